"""Completions of the model and of each of its LoRA adapters, at the same time.

Start the cluster with adapters, such as `BATON_ADAPTER=sql=/adapters/sql baton up`. Requests with different adapters
share the steps of a batch.
"""

import asyncio

from baton import AsyncClient


async def main() -> None:
    async with AsyncClient() as client:
        cards = await client.list_models()
        outputs = await asyncio.gather(
            *(client.complete("Return the", {"max_tokens": 20, "temperature": 0}, model=card.name) for card in cards)
        )
    for card, output in zip(cards, outputs, strict=True):
        kind = f"adapter of {card.parent}" if card.parent else "model"
        print(f"{card.name} ({kind}): {output.text!r}")


asyncio.run(main())
