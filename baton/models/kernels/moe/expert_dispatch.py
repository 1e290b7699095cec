"""Sends tokens to the ranks that hold their experts, and the results back, through the ranks' memory.

As in `baton.models.kernels.peer_sums`, the data are their own signal: a place is `EMPTY` until its number arrives, and
its reader makes it `EMPTY` again. `send` writes a token's experts and weights to all ranks, so that each knows what it
receives, and its row only to ranks with one of its experts. On every rank a row keeps its place among all ranks' rows,
so nobody counts or sorts before sending, and experts compute what they compute after a gather. `send_back` returns one
row per token and rank; `add_up` adds a token's rows in the order of the ranks.

Places of rows have two turns. A rank sends for turn n + 2 after it has received all ranks' experts for turn n + 1,
which each sent after it had ended turn n. Returned rows need one turn: a rank returns a row of turn n + 1 after it has
received that turn's experts, sent after the rows of turn n were added up. Turns are counted by row, because steps
differ in their rows. No launch waits for a later one of another rank, so launches of any size make progress.

A rank's launches are on one stream, all ranks make the same ones, with the same width, and their `ExpertRanks` change
between the same steps. A wait has no end of its own: when a rank ends, `baton.node.ranks` ends the others. Legend: R
rank, T this rank's token, A row of any rank in their order, D channel, K choice of a token, E expert, C copy.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from baton.models.kernels.moe import expert_dispatch_kernels as kernels
from baton.tritonlib.launch import interpreted, overlap

TURNS = 2
_BLOCK = 1024  # channels of one program


@dataclass(frozen=True, eq=False)
class DispatchMemory:
    """Memory of all ranks through which tokens go to their experts.

    Attributes:
        addresses_R: int64, where each rank's places begin, as this rank addresses them: experts and weights
            [turn, row, sending rank, 2, K] in 32 bits, rows [turn, row, sending rank, D], and returned rows
            [row, returning rank, D]. They are `EMPTY` at first.
        turns_T: int32, the turn of each of a rank's rows; 0 at first.
        dtype, width: of a row.
        choices: K.
        owner: what keeps the memory mapped.
    """

    rank: int
    size: int
    addresses_R: Tensor
    turns_T: Tensor
    dtype: torch.dtype
    width: int
    choices: int
    owner: object = None

    @property
    def most_rows(self) -> int:
        return len(self.turns_T)


@dataclass(frozen=True, eq=False)
class ExpertRanks:
    """Which rank computes a token's expert: copies take tokens in turn, by their row among all ranks'.

    Attributes:
        ranks_EC: int32, the rank of each copy.
        copies_E: int32, the number of copies.
    """

    ranks_EC: Tensor
    copies_E: Tensor


@dataclass(frozen=True, eq=False)
class Received:
    """All ranks' tokens on one rank. Rows of `x_AD` without an expert on this rank are undefined.

    Attributes:
        experts_AK: 0 for rows that no expert computes, as their weights are.
        is_own_A: int32, whether an expert of the row is on this rank.
    """

    x_AD: Tensor
    weights_AK: Tensor
    experts_AK: Tensor
    is_own_A: Tensor


def num_bytes(size: int, rows: int, *, width: int, choices: int, dtype: torch.dtype) -> int:
    """Returns how much memory a rank's places take. Bytes of all ones make them `EMPTY`."""
    return rows * size * (TURNS * 2 * choices * 4 + (TURNS + 1) * width * dtype.itemsize)


def send(
    memory: DispatchMemory,
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    ranks: ExpertRanks,
    *,
    width: int,
    slots_T: Tensor | None = None,
) -> Tensor:
    """Sends this rank's tokens. It waits for nobody. Returns int32 [T], the ranks that return each row, one bit each.

    Args:
        weights_TK, experts_TK: contiguous; float32, and any integers.
        width: the most tokens of a rank, on all ranks; at most `memory.most_rows`.
        slots_T: int64; rows whose slot is below 0 are padding, which no expert computes. None: there is none.
    """
    assert x_TD.dtype is memory.dtype
    assert x_TD.shape[1] == memory.width
    assert experts_TK.shape[1] == memory.choices
    assert weights_TK.dtype is torch.float32
    assert weights_TK.is_contiguous()
    assert experts_TK.is_contiguous()
    assert len(x_TD) <= width <= memory.most_rows, "the caller has asked"
    asked_T = torch.empty(len(x_TD), dtype=torch.int32, device=x_TD.device)
    kernels.send[(width, _num_parts(memory))](
        x_TD,
        weights_TK,
        experts_TK,
        slots_T,
        asked_T,
        ranks.ranks_EC,
        ranks.copies_E,
        memory.addresses_R,
        memory.turns_T,
        memory.rank,
        len(x_TD),
        width,
        x_TD.stride(0),
        COPIES=ranks.ranks_EC.shape[1],
        BLOCK_K=triton.next_power_of_2(memory.choices),
        **_constants(memory),
        **overlap(x_TD.device, rows=width),
    )
    return asked_T


def receive(memory: DispatchMemory, ranks: ExpertRanks, *, width: int, experts_dtype: torch.dtype) -> Received:
    """Waits for all ranks' tokens of this launch. Row `rank * width + row` is a rank's row."""
    device, num_rows = memory.turns_T.device, memory.size * width
    received = Received(
        torch.empty(num_rows, memory.width, dtype=memory.dtype, device=device),
        torch.empty(num_rows, memory.choices, dtype=torch.float32, device=device),
        torch.empty(num_rows, memory.choices, dtype=experts_dtype, device=device),
        torch.empty(num_rows, dtype=torch.int32, device=device),
    )
    kernels.receive[(num_rows, _num_parts(memory))](
        received.x_AD,
        received.weights_AK,
        received.experts_AK,
        received.is_own_A,
        ranks.ranks_EC,
        ranks.copies_E,
        memory.addresses_R,
        memory.turns_T,
        memory.rank,
        width,
        COPIES=ranks.ranks_EC.shape[1],
        BLOCK_K=triton.next_power_of_2(memory.choices),
        **_constants(memory),
        **overlap(device, rows=width),
    )
    return received


def send_back(memory: DispatchMemory, part_AD: Tensor, received: Received, *, width: int) -> None:
    """Returns this rank's experts' sum of each row to the row's rank. It waits for nobody.

    Args:
        part_AD: of the rows of `received`.
    """
    kernels.send_back[(len(part_AD), _num_parts(memory))](
        part_AD,
        received.is_own_A,
        memory.addresses_R,
        memory.turns_T,
        memory.rank,
        width,
        part_AD.stride(0),
        BLOCK_K=triton.next_power_of_2(memory.choices),
        **_constants(memory),
        **overlap(part_AD.device, rows=width),
    )


def add_up(memory: DispatchMemory, asked_T: Tensor, *, width: int, plus_TD: Tensor | None = None) -> Tensor:
    """Waits for the returned rows and returns their sums [T, D], with the bits of `rank_sums.sum_parts`.

    Args:
        asked_T: what `send` returned.
        plus_TD: added to the rounded sums; contiguous.
    """
    device = asked_T.device
    out_TD = torch.empty(len(asked_T), memory.width, dtype=memory.dtype, device=device)
    kernels.add_up[(width, _num_parts(memory))](
        out_TD,
        plus_TD,
        asked_T,
        memory.addresses_R,
        memory.turns_T,
        memory.rank,
        len(asked_T),
        INTERPRETED=interpreted(),
        **_constants(memory),
        **overlap(device, rows=width),
    )
    return out_TD


def _num_parts(memory: DispatchMemory) -> int:
    return -(-memory.width // _block(memory))


def _block(memory: DispatchMemory) -> int:
    return int(min(_BLOCK, triton.next_power_of_2(memory.width)))


def _constants(memory: DispatchMemory) -> dict[str, int]:
    # NOTE: a thread that polls a number must be the only one, or the number's reader empties it for the others. So
    # there are at most as many threads as numbers in a block.
    block = _block(memory)
    return {
        "RANKS": memory.size,
        "CAPACITY": memory.most_rows,
        "SIZE": memory.width,
        "CHOICES": memory.choices,
        "BLOCK": block,
        "TURNS": TURNS,
        "num_warps": max(1, min(4, block // 256)),
    }
