"""Shows the tokens of an answer with their logprobs and alternatives as a table of texts."""

import asyncio
from collections.abc import Mapping, Sequence

from baton.client.client import AsyncClient
from baton.core.types import TokenOutput

_CALLS_MAX = 32  # at once
_TEXT_MAX = 24  # characters of a token
_HEADER = ("logprob", "token", "instead of it")


async def token_texts(client: AsyncClient, tokens: Sequence[TokenOutput]) -> dict[int, str]:
    """Returns the text of each token and of its alternatives, by token id. Part of a character is U+FFFD."""
    found = sorted({token_id for token in tokens for token_id in (token.token_id, *dict(token.top_logprobs))})
    free = asyncio.Semaphore(_CALLS_MAX)

    async def text(token_id: int) -> str:
        async with free:
            return await client.detokenize([token_id], skip_special_tokens=False)

    return dict(zip(found, await asyncio.gather(*map(text, found)), strict=True))


def logprob_table(tokens: Sequence[TokenOutput], texts: Mapping[int, str]) -> str:
    """One line per token: its logprob, its text in quotes, and the other most probable tokens, best first."""
    rows = []
    for token in tokens:
        others = [
            f"{_quoted(texts[token_id])} {logprob:.2f}"
            for token_id, logprob in token.top_logprobs
            if token_id != token.token_id
        ]
        logprob = "" if token.logprob is None else f"{token.logprob:.2f}"
        rows.append((logprob, _quoted(texts[token.token_id]), "  ".join(others)))
    widths = [max(len(row[column]) for row in (_HEADER, *rows)) for column in range(2)]
    return "\n".join(
        f"{logprob:>{widths[0]}}  {text:<{widths[1]}}  {others}".rstrip() for logprob, text, others in (_HEADER, *rows)
    )


def _quoted(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= _TEXT_MAX else f"{shown[: _TEXT_MAX - 4]}...{shown[-1]}"
