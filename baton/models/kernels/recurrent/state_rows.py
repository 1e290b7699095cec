"""The recurrent states that a step reads and writes, for all recurrent layers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateRows:
    """The requests of a step: first its decodes, one token each, then its prompts.

    Decodes and prompts lie one after the other among the tokens: token i of the first N is that of decode i, if
    `decode_lens_N[i]` is above 0. The tensors have fixed sizes where a CUDA graph reads them, so they may have rows of
    padding, which read and write nothing.

    Attributes:
        decode_slots_N: int32, slot of each decode; -1 for a row that is none, and in steps that only compile or
            capture: such a row reads and writes nothing, whatever its length. -2 - slot (`continuing`): the state
            before is the one after another row, which has this row in `decode_next_N`, and the slot gets the state
            after this row.
        decode_lens_N: int32, tokens of the sequence, this one included; 1: the state before is zero, whatever the slot
            holds; 0 for a row that is no decode.
        prompt_slots_P: int32, slot of each prompt; -1 as above. P may be 0.
        prompt_starts_P1: [P + 1] int32, where each prompt's tokens start.
        prompt_context_P: int32, tokens of the prompt that are in the state already; 0: the state before is zero,
            whatever the slot holds.
        snapshot_slots_PM: [P, M] int32, slots that get a prompt's state within its new tokens, in addition to the
            prompt's own slot, which gets the state after all of them; -1: none.
        snapshot_lens_PM: int32, the number of new tokens in such a state, fewer than the prompt has. Unless `in_order`,
            they end at a multiple of the layers' sub-chunks of its positions, so the state has the bits that a cut
            there would give.
        max_prompt_tokens: an upper bound of a prompt's new tokens.
        decode_next_N: int32, the decode that continues the state of this one; -1: none. None: no decode does.
        in_order: prompts are computed token by token, with the bits of decodes.
    """

    decode_slots_N: Tensor
    decode_lens_N: Tensor
    prompt_slots_P: Tensor
    prompt_starts_P1: Tensor
    prompt_context_P: Tensor
    snapshot_slots_PM: Tensor
    snapshot_lens_PM: Tensor
    max_prompt_tokens: int
    decode_next_N: Tensor | None = None
    in_order: bool = False


def continuing(slot: int) -> int:
    """What `StateRows.decode_slots_N` has for a row that continues another one's state, and writes its own to this
    slot."""
    return -2 - slot


class PromptRow(NamedTuple):
    """A prompt of a step, on the host.

    Attributes:
        start, stop: its tokens in the step.
        snapshots: slots that receive the state, by the token before which it is taken.
    """

    slot: int
    context: int
    start: int
    stop: int
    snapshots: Mapping[int, int]


class Continued(NamedTuple):
    """Decodes that continue the states of others, all of them as far from the first one of their request.

    Attributes:
        rows: the same decodes, as if nothing came before them.
        places: [M] int64, where they are among the step's decodes.
        before, after: [M] int64, the slots with the states before and after them.
    """

    rows: StateRows
    places: Tensor
    before: Tensor
    after: Tensor


def continued(rows: StateRows) -> Iterator[Continued]:
    """Yields the decodes that continue others, in an order in which the states before them are there. Waits for the
    device."""
    if rows.decode_next_N is None:
        return
    next_N, slots_N, none = rows.decode_next_N.long(), rows.decode_slots_N.long(), rows.decode_slots_N[:0]
    last_M = torch.nonzero((next_N >= 0) & (slots_N >= 0)).flatten()
    before_M = slots_N[last_M]
    while len(last_M):
        places_M = next_N[last_M]
        after_M = -2 - slots_N[places_M]
        starts = torch.full_like(rows.prompt_starts_P1[:1], len(places_M))
        decodes = after_M.int(), rows.decode_lens_N[places_M]
        alone = StateRows(*decodes, none, starts, none, none[:, None], none[:, None], max_prompt_tokens=0)
        yield Continued(alone, places_M, before_M, after_M)
        has_next_M = next_N[places_M] >= 0
        last_M, before_M = places_M[has_next_M], after_M[has_next_M]


def prompts_of(rows: StateRows) -> Iterator[PromptRow]:
    """Yields each prompt with tokens. Waits for the device."""
    starts = rows.prompt_starts_P1.tolist()
    prompts = rows.prompt_slots_P, rows.prompt_context_P, rows.snapshot_slots_PM, rows.snapshot_lens_PM
    for start, stop, slot, context, slots_M, lens_M in zip(
        starts[:-1], starts[1:], *(each.tolist() for each in prompts), strict=True
    ):
        if slot >= 0 and stop > start:
            kept = {start + length: each for each, length in zip(slots_M, lens_M, strict=True) if each >= 0}
            yield PromptRow(slot, context, start, stop, kept)


def one_by_one(start: int, stop: int) -> Iterator[slice]:
    """Each of the tokens start..stop."""
    return (slice(token, token + 1) for token in range(start, stop))
