"""Plans how programs share the keys of a batch of decodes; `attention.kernels.decode.attend` follows the plan.

The plan is made on the device, in tensors, so that a captured CUDA graph follows the lengths of each replay. Legend: R
requests, W workers, U units, P partial results.

Each request's keys are cut into units of one length, counted from the sequence's start; units are longer where the plan
bounds their number, and units that the query cannot see are left out. All units of the batch, request after
request, are divided among the workers in equal runs, so that a worker's share does not depend on how ragged the batch
is. A request in several runs leaves a partial result in each, and these are merged afterwards. A request without keys
has a unit too, whose worker writes its result, unless units are in order. One worker is as many programs as there are
kv heads: they read the same blocks at the same time.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.core.errors import InternalError

# Stands for "no limit" in a window or a chunk size: no sequence is longer.
NO_LIMIT = 2**31 - 1
# Bytes of a tile of keys. With three stages, two such tiles of keys and two of values are in flight for each program.
_TILE_BYTES = 16384


@dataclass(frozen=True)
class DecodeTiling:
    """The tile sizes and launch options of the decode kernel.

    Attributes:
        tile_keys: keys that one program holds at a time.
        num_warps, num_stages: of a program.
        programs_per_sm: how many programs run on a multiprocessor at once.
        max_registers: limit per thread, set where the compiler would otherwise use so many that fewer programs run.
        prompt_rows, prompt_stages: query rows and stages of a program that computes prompts in order.
    """

    tile_keys: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    max_registers: int | None = None
    prompt_rows: int = 128
    prompt_stages: int = 3


def decode_tiling(head_size: int, cache_dtype: torch.dtype) -> DecodeTiling:
    """Returns the tiling that reads fastest. It depends on the cache's shape alone, never on a batch.

    On an H200, 64 requests of 4096 tokens, 32/8 heads of 128 in bfloat16: 256 us, 4.2 TB/s; three programs per
    multiprocessor 262, one 304; tiles of 32 keys 262, of 128 264; two warps 266, eight 304.
    """
    channels = max(16, triton.next_power_of_2(head_size))
    tile_keys = min(128, max(16, _TILE_BYTES // (channels * cache_dtype.itemsize)))
    # A third program pays where the tiles in flight are smaller and it fits. Padded channels load nothing: with 80 of
    # 128 it takes 203 us instead of 224; 192 of 256 leaves no registers. 64 channels of fp8 take 104 us instead of 119.
    if cache_dtype.itemsize == 1:
        three = channels <= 64
    else:
        three = cache_dtype.itemsize == 2 and channels <= 128 and head_size * 8 <= channels * 5
    if three:  # the limit, because merging would take the third program's registers
        return DecodeTiling(tile_keys, num_warps=4, num_stages=3, programs_per_sm=3, max_registers=168)
    return DecodeTiling(tile_keys, num_warps=4, num_stages=3, programs_per_sm=2)


def in_order_tiling(head_size: int, cache_dtype: torch.dtype, *, hopper: bool) -> DecodeTiling:
    """Returns the tiling for units that are in order. It depends on the cache's shape and the GPU alone, never on a
    batch.

    On Hopper all tiles have 64 keys, the rows of its product. GPUs before it have less shared memory.
    """
    plain = decode_tiling(head_size, cache_dtype)
    channels = max(16, triton.next_power_of_2(head_size))
    if not hopper or cache_dtype.itemsize == 4:
        tile_keys = min(plain.tile_keys, 64 if channels <= 128 else 32)
        rows = 128 if channels <= 128 else 64
        return replace(
            plain, tile_keys=tile_keys, programs_per_sm=2, max_registers=None, prompt_rows=rows, prompt_stages=2
        )
    tile_bytes = 64 * channels * cache_dtype.itemsize
    if tile_bytes < _TILE_BYTES:
        return DecodeTiling(64, num_warps=4, num_stages=4, programs_per_sm=3, max_registers=168)
    if tile_bytes == _TILE_BYTES:
        return DecodeTiling(64, num_warps=4, num_stages=3, programs_per_sm=2)
    return DecodeTiling(64, num_warps=4, num_stages=3, programs_per_sm=1, prompt_stages=2)


@dataclass(frozen=True)
class DecodePartials:
    """Memory for partial results, shared by all plans and layers of a backend; used by one stream at a time.

    Attributes:
        out: [P, H, D] float32, normalised.
        lse2: [P, H] float32, the binary logarithm of the sum of exponentials.
        arrived: int32, how many of a request's workers have left their results, for each program of a worker. Every
            launch leaves zeros.
    """

    out: Tensor
    lse2: Tensor
    arrived: Tensor


class Units(NamedTuple):
    """How keys are cut into units; constants of the kernels.

    Args:
        unit_keys: a multiple of the tiling's tile_keys.
        in_order: every unit leaves its own partial result, and these are merged one after another, so that a row's
            result has the same bits alone, in any batch, and within a prompt. Otherwise a worker's share of a request
            leaves one partial result.
        max_units: largest number of units that a row's visible keys may have, plus one where the first key is inside a
            unit. Later rows get units that are a whole number of times longer. 0: no limit.
        tile_tokens: rows of so many tokens, counted from the sequence's start, have units of one length.
    """

    unit_keys: int
    in_order: bool
    max_units: int
    tile_tokens: int


@dataclass(frozen=True)
class DecodePlan:
    """The plan of a batch of up to `max_num_reqs` requests, in buffers that `fill` overwrites for each batch.

    Attributes:
        sliding_window, attention_chunk_size: as in `attention.parameters`; they decide which keys are seen.
        unit_starts: [max_num_reqs + 1] int32, where each request's units begin among the batch's.
        first_requests: [W] int32, the request in which each worker begins.
    """

    tiling: DecodeTiling
    units: Units
    sliding_window: int | None
    attention_chunk_size: int | None
    unit_starts: Tensor
    first_requests: Tensor
    partials: DecodePartials

    @property
    def num_workers(self) -> int:
        return self.first_requests.shape[0]

    def fill(self, seq_lens_R: Tensor) -> None:
        """Plans a batch of these lengths, on the device; 0 is a padded request.

        Raises:
            InternalError: the plan's buffers are for fewer requests.
        """
        num_reqs, max_num_reqs = seq_lens_R.shape[0], self.unit_starts.shape[0] - 1
        if num_reqs > max_num_reqs:
            raise InternalError(
                f"{num_reqs} requests in a plan for {max_num_reqs}",
                field="max_num_reqs",
                value=num_reqs,
                allowed=(f"at most {max_num_reqs}",),
            )
        _plan_kernel[(self.num_workers,)](
            seq_lens_R,
            self.unit_starts,
            self.first_requests,
            num_reqs,
            self.num_workers,
            self.sliding_window or NO_LIMIT,
            self.attention_chunk_size or NO_LIMIT,
            UNITS=self.units,
            # The value is equal for most batches, so that few kernels are compiled.
            BLOCK_R=max(128, triton.next_power_of_2(num_reqs)),
        )


def num_decode_workers(num_kv_heads: int, num_sms: int, tiling: DecodeTiling) -> int:
    """Returns how many workers the GPU runs at once."""
    return max(1, num_sms * tiling.programs_per_sm // num_kv_heads)


def new_partials(
    *, max_num_reqs: int, num_workers: int, num_heads: int, head_size: int, max_units: int = 0, device: torch.device
) -> DecodePartials:
    """Allocates memory for any batch. `max_units` is the number of units of a whole batch where every unit has its own
    result."""
    # A run of units begins either with a request or with a worker.
    places = max(max_num_reqs + num_workers, max_units)
    return DecodePartials(
        out=torch.empty(places, num_heads, head_size, dtype=torch.float32, device=device),
        lse2=torch.empty(places, num_heads, dtype=torch.float32, device=device),
        arrived=torch.zeros(max_num_reqs * num_heads, dtype=torch.int32, device=device),
    )


def new_decode_plan(
    *,
    tiling: DecodeTiling,
    max_num_reqs: int,
    num_workers: int,
    partials: DecodePartials,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
    split_keys: int | None = None,
    max_splits: int = 0,
    tile_tokens: int = 1,
) -> DecodePlan:
    """Allocates an empty plan.

    Args:
        split_keys: keys of a row that make one partial result, counted from its sequence's start and independent of
            the rest of the batch; a multiple of the tiling's tile_keys. None: the split that balances the batch best.
        max_splits: most splits of a row; later rows have longer splits. 0: any number.
        tile_tokens: as for `Units`.
    """
    device = partials.out.device
    assert split_keys is None or split_keys % tiling.tile_keys == 0
    return DecodePlan(
        tiling=tiling,
        units=Units(
            unit_keys=split_keys or tiling.tile_keys,
            in_order=split_keys is not None,
            max_units=0 if split_keys is None else max_splits,
            tile_tokens=tile_tokens,
        ),
        sliding_window=sliding_window,
        attention_chunk_size=attention_chunk_size,
        unit_starts=torch.zeros(max_num_reqs + 1, dtype=torch.int32, device=device),
        first_requests=torch.zeros(num_workers, dtype=torch.int32, device=device),
        partials=partials,
    )


@triton.jit
def first_visible_key(seq_len, window, chunk):
    """Returns the first key that a request's last token sees."""
    return tl.maximum(tl.maximum(seq_len - window, (seq_len - 1) // chunk * chunk), 0)


@triton.jit
def unit_keys_of(seq_len, window, chunk, UNITS: tl.constexpr):
    """Returns the number of keys per unit for the last token of a sequence of this length."""
    unit_keys = UNITS.unit_keys + seq_len * 0
    if UNITS.max_units:
        most = UNITS.unit_keys * UNITS.max_units
        # Of the last token of its tile, so that a tile's rows agree. No row sees more keys than a window or chunk has.
        tile_stop = (seq_len + UNITS.tile_tokens - 1) // UNITS.tile_tokens * UNITS.tile_tokens
        visible = tl.minimum(tl.minimum(tile_stop, window), chunk)
        unit_keys *= tl.maximum((visible - 1) // most + 1, 1)
    return unit_keys


@triton.jit
def keys_of_units(unit, stop, first_unit, seq_len, window, chunk, TILE_KEYS: tl.constexpr, UNITS: tl.constexpr):
    """Returns the first key that a request's last token sees, the first key to load and the end, for the units from
    `unit` to `stop`, which are counted like `first_unit`, the request's first."""
    first_key = first_visible_key(seq_len, window, chunk)
    unit_keys = unit_keys_of(seq_len, window, chunk, UNITS) if UNITS.max_units else UNITS.unit_keys
    unit_zero = first_key // unit_keys - first_unit
    start = tl.maximum((unit_zero + unit) * unit_keys, first_key // TILE_KEYS * TILE_KEYS)
    return first_key, start, tl.minimum((unit_zero + stop) * unit_keys, seq_len)


@triton.jit
def units_per_worker(num_units, num_workers):
    return tl.maximum((num_units + num_workers - 1) // num_workers, 1)


@triton.jit(do_not_specialize=["num_reqs", "num_workers", "window", "chunk"])
def _plan_kernel(
    seq_lens_ptr,
    unit_starts_ptr,
    first_requests_ptr,
    num_reqs,
    num_workers,
    window,
    chunk,
    UNITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Every program computes the whole plan and stores one worker's part of it."""
    worker = tl.program_id(0)
    requests = tl.arange(0, BLOCK_R)
    seq_lens = tl.load(seq_lens_ptr + requests, mask=requests < num_reqs, other=0)
    first_keys = first_visible_key(seq_lens, window, chunk)
    unit_keys = unit_keys_of(seq_lens, window, chunk, UNITS)
    units = (seq_lens + unit_keys - 1) // unit_keys - first_keys // unit_keys
    units = (
        tl.where(seq_lens > 0, units, 0) if UNITS.in_order else tl.where(requests < num_reqs, tl.maximum(units, 1), 0)
    )
    stops = tl.cumsum(units, 0)
    start = worker * units_per_worker(tl.sum(units, 0), num_workers)
    before = (stops <= start) & (requests < num_reqs)
    tl.store(first_requests_ptr + worker, tl.sum(before.to(tl.int32), 0))
    if worker == 0:
        tl.store(unit_starts_ptr, 0)
        tl.store(unit_starts_ptr + 1 + requests, stops, mask=requests < num_reqs)
