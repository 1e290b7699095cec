"""Requests three completions and the answer of a chat at the same time."""

import asyncio

from baton import AsyncClient


async def main() -> None:
    async with AsyncClient() as client:
        drafts, answer = await asyncio.gather(
            client.complete("Return the", {"max_tokens": 20, "temperature": 1.0}, n=3),
            client.chat([{"role": "user", "content": "What does zip do?"}], {"max_tokens": 40}),
        )
    for draft in drafts:
        print(draft.index, draft.text)
    print(answer.text, answer.usage, answer.receipt.path)


asyncio.run(main())
