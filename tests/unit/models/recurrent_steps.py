"""The states of a step's requests, made by hand for tests without an engine."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from baton.engine.batch import MOST_SNAPSHOTS
from baton.models.kernels.recurrent.state_rows import StateRows

_PADDING = 2


def state_rows(
    slots: Sequence[int],
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    decodes: int | None = None,
    snapshots: Mapping[int, Sequence[tuple[int, int]]] = MappingProxyType({}),
    device: str = "cpu",
) -> StateRows:
    """The rows of requests with these slots, new tokens and earlier tokens, and some rows of padding.

    Args:
        decodes: how many of the first requests are decodes, all from there on are prompts; None: those with one token.
        snapshots: by the slot of a prompt, up to two (new tokens, slot for the state after these).
    """
    if decodes is None:
        decodes = next((index for index, length in enumerate(query_lens) if length != 1), len(query_lens))
    prompt_starts = [sum(query_lens[:index]) for index in range(decodes, len(query_lens) + 1)]

    def padded(values: Sequence[int], padding: int) -> torch.Tensor:
        return torch.tensor([*values, *[padding] * _PADDING], dtype=torch.int32, device=device)

    kept = [[*snapshots.get(slot, ()), *[(0, -1)] * MOST_SNAPSHOTS][:MOST_SNAPSHOTS] for slot in slots[decodes:]]
    kept_PM2 = torch.tensor([*kept, *[[(0, -1)] * MOST_SNAPSHOTS] * _PADDING], dtype=torch.int32, device=device)

    return StateRows(
        decode_slots_N=padded(slots[:decodes], -1),
        decode_lens_N=padded([length + 1 for length in context_lens[:decodes]], 0),
        prompt_slots_P=padded(slots[decodes:], -1),
        prompt_starts_P1=padded(prompt_starts, prompt_starts[-1]),
        prompt_context_P=padded(context_lens[decodes:], 0),
        snapshot_slots_PM=kept_PM2[..., 1].contiguous(),
        snapshot_lens_PM=kept_PM2[..., 0].contiguous(),
        max_prompt_tokens=max(query_lens[decodes:], default=0),
    )
