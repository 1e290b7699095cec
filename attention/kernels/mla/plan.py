"""Divides the keys of a decode step among workers. The host makes the plan, and each worker computes its share on the
device.

Everything is counted in tiles of keys, in one sequence of all requests' tiles, request after request. Legend: R
requests, H heads, L latent channels, M members (heads of the tokens of a query tile), J query tiles.

With a fixed split, a program computes a query tile: the tokens of one request between two multiples of `tile_tokens`,
counted from the request's first token. A decode's query tile has one token, a prompt's up to all. A token has the same
tiles of keys in both, so it gets the same bits: from the same instructions at the same place among the members, or, on
Hopper, from products whose bits do not depend on the axis of the members (`attention.kernels.mla.hopper_attend`).
"""

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.tritonlib.hopper_check import HopperKernels, has_hopper_kernels, probe_of

TILE = 64
LOG2_E = 1.4426950408889634
# Most query tiles of a launch, whose programs each read all lengths.
MAX_QUERY_TILES = 512
_TILE_MEMBERS = 64
# Memory for partial results is for at least this many query tiles of the longest request.
_LEAST_TILES = 16


@dataclass(frozen=True)
class MLADecodePlan:
    """The division of a decode step's keys among workers. It is made once for all steps and layers, and holds for any
    lengths.

    Attributes:
        num_workers: number of equal runs into which a step's keys are cut.
        split_tiles: cut every request at multiples of this many of its own tiles, so that its result is the same in
            any batch; 0: cut the whole step evenly.
        partial_output: [slots, H, L] float32, shared by all layers; used by one stream at a time.
        partial_lse: [slots, H] float32.
        tile_tokens: number of tokens of a full query tile; it divides TILE.
        hopper: `attention.kernels.mla.hopper` where it can run; None elsewhere.
        gathered: `attention.kernels.mla.gathered`, for selected tokens, where it can run; None elsewhere.
    """

    num_workers: int
    split_tiles: int
    partial_output: Tensor
    partial_lse: Tensor
    hopper: ModuleType | None
    gathered: ModuleType | None
    tile_tokens: int = 1


def make_mla_decode_plan(
    *,
    num_heads: int,
    latent_channels: int,
    max_num_reqs: int,
    max_model_len: int,
    num_sms: int,
    device: torch.device | str,
    split_tokens: int | None = None,
) -> MLADecodePlan:
    """Allocates the memory for partial results: 34 MB for 132 multiprocessors, 128 heads and 512 channels.

    Args:
        split_tokens: a fixed split, rounded up to whole tiles of 64 keys; the memory is then for every split of
            `max_num_reqs` requests of `max_model_len` tokens, and of a few query tiles.
    """
    device = torch.device(device)
    num_workers = max(1, num_sms // triton.cdiv(num_heads, heads_of_a_program(num_heads)))
    split_tiles = 0 if split_tokens is None else triton.cdiv(split_tokens, TILE)
    tile_tokens = tile_tokens_of(num_heads) if split_tiles else 1
    slots = 2 * num_workers
    if split_tiles:
        slots = max(max_num_reqs, _LEAST_TILES * tile_tokens) * triton.cdiv(max_model_len, split_tiles * TILE)
    return MLADecodePlan(
        num_workers=num_workers,
        split_tiles=split_tiles,
        partial_output=torch.empty(slots, num_heads, latent_channels, dtype=torch.float32, device=device),
        partial_lse=torch.empty(slots, num_heads, dtype=torch.float32, device=device),
        hopper=_hopper_kernel("hopper", device),
        gathered=_hopper_kernel("gathered", device),
        tile_tokens=tile_tokens,
    )


def heads_of_a_program(num_heads: int) -> int:
    """Returns the number of heads of one program: 64 keep the tensor cores busy; with fewer, memory is the bound."""
    return 16 if num_heads <= 16 else 32 if num_heads <= 32 else 64


def tile_tokens_of(num_heads: int) -> int:
    """Returns the number of tokens whose heads fill a program of 64 members. It divides 16, the fewest keys of a step,
    so that each token sees a key of every step of its query tile."""
    tokens = 1
    while tokens < 16 and 2 * tokens * num_heads <= _TILE_MEMBERS:
        tokens *= 2
    return tokens


def members_of_a_program(num_heads: int, tile_tokens: int) -> int:
    return heads_of_a_program(num_heads) if tile_tokens == 1 else _TILE_MEMBERS


def most_requests(num_reqs: int, tiles: Tensor | None) -> int:
    """Returns the number of requests for which a launch's kernel is compiled, the same for any query tiles."""
    return num_reqs if tiles is None else MAX_QUERY_TILES


def requests_of_a_block(num_reqs: int) -> int:
    """Returns the number of requests rounded up to a power of two; it is equal for most batches, so few kernels are
    compiled."""
    return 128 if num_reqs <= 128 else 1 << (num_reqs - 1).bit_length()


def _hopper_kernel(name: str, device: torch.device) -> ModuleType | None:
    if not has_hopper_kernels(device, _HOPPER):
        return None
    return importlib.import_module(f"attention.kernels.mla.{name}")


_HOPPER = HopperKernels("decode over a latent cache", probe_of("attention.kernels.mla.probe"))


@triton.jit
def request_cost(seq_len, SPLIT_TILES: tl.constexpr, TILE: tl.constexpr):
    """Returns the number of tiles that each request takes in the sequence; with a fixed split, whole splits."""
    tiles = (seq_len + TILE - 1) // TILE
    if SPLIT_TILES:
        tiles = (tiles + SPLIT_TILES - 1) // SPLIT_TILES * SPLIT_TILES
    return tiles


@triton.jit
def find_work(
    seq_lens, num_reqs, worker, num_workers, SPLIT_TILES: tl.constexpr, TILE: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Returns (first request, start of its tiles, start and end of this worker's tiles); all workers get equal runs."""
    requests_R = tl.arange(0, BLOCK_R)
    lens_R = tl.load(seq_lens + requests_R, mask=requests_R < num_reqs, other=0)
    costs_R = request_cost(lens_R, SPLIT_TILES, TILE)
    stops_R = tl.cumsum(costs_R, 0)
    total = tl.sum(costs_R, 0)
    if SPLIT_TILES:
        share = tl.cdiv(total // SPLIT_TILES, num_workers) * SPLIT_TILES
    else:
        share = tl.cdiv(total, num_workers)
    start = tl.minimum(worker * share, total)
    stop = tl.minimum(start + share, total)
    behind_R = stops_R <= start
    request = tl.sum(behind_R.to(tl.int32), 0)
    request_start = tl.sum(tl.where(behind_R, costs_R, 0), 0)
    return request, request_start, start, stop


@triton.jit
def tokens_after(seq_len, members_M, num_heads, TOKENS: tl.constexpr):
    """Returns how many tokens after each member's token the query tile's last one is; below 0 past the last.

    Args:
        seq_len: number of the request's tokens up to the query tile's last.
    """
    return (seq_len - 1) % TOKENS - members_M // num_heads


@triton.jit
def members_of_tile(tiles, tile, seq_len, members_M, num_heads, TOKENS: tl.constexpr):
    """Returns (which members exist, their heads, their tokens' query rows, and these tokens' places among the query
    tile's).

    Args:
        tiles: as in `attention.kernels.mla.decode`.
    """
    last_row = tile
    count = 1
    if tiles is not None:
        last_row = tl.load(tiles + 3 * tile)
        count = tl.load(tiles + 3 * tile + 1)
    after_M = tokens_after(seq_len, members_M, num_heads, TOKENS)
    exists_M = (members_M < TOKENS * num_heads) & (after_M >= 0) & (after_M < count)
    return exists_M, members_M % num_heads, (last_row - after_M).to(tl.int64), count - 1 - after_M
