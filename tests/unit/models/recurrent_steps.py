"""The states of a step's requests, made by hand for tests without an engine."""

from collections.abc import Sequence

import torch

from models.recurrent.rows import StateRows

_PADDING = 2


def state_rows(
    slots: Sequence[int],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    decodes: int | None = None,
    device: str = "cpu",
) -> StateRows:
    """The rows of requests with these slots, new tokens and earlier tokens, and some rows of padding.

    Args:
        decodes: how many of the first requests are decodes, all from there on are prompts; None: those with one token.
    """
    if decodes is None:
        decodes = next((index for index, length in enumerate(query_lens) if length != 1), len(query_lens))
    prompt_starts = [sum(query_lens[:index]) for index in range(decodes, len(query_lens) + 1)]

    def padded(values: Sequence[int], padding: int) -> torch.Tensor:
        return torch.tensor([*values, *[padding] * _PADDING], dtype=torch.int32, device=device)

    return StateRows(
        decode_slots_N=padded(slots[:decodes], -1),
        decode_lens_N=padded([length + 1 for length in context_lens[:decodes]], 0),
        prompt_slots_P=padded(slots[decodes:], -1),
        prompt_starts_P1=padded(prompt_starts, prompt_starts[-1]),
        prompt_context_P=padded(context_lens[decodes:], 0),
        max_prompt_tokens=max(query_lens[decodes:], default=0),
    )
