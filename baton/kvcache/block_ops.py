"""Copies whole blocks within a cache, swaps them between the caches of a GPU and its host, and converts their dtype.

Library API: the engine does not use it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.core.errors import InternalError
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.fp8 import dequantize, is_fp8, quantize
from baton.kvcache.kernels.blocks import convert, copy

# Source and target blocks: pairs [P, 2] int64 on the CPU, or a source with its target or targets.
BlockPairs = Tensor | Mapping[int, int] | Mapping[int, Sequence[int]]

# The GPU's copy engine takes pieces of at least this size that are contiguous in both caches. Smaller pieces are moved
# over the bus by one kernel, because the copy engine needs 8 us to start each copy. On an H200, where pinned
# memory is copied at 55 GB/s: pieces of 32 KiB, engine 4 GB/s, kernel 51-53; of 1 MiB, engine 50; of 4 MiB, engine 54.
_ENGINE_BYTES = 1 << 20
# Programs of that kernel: 16 keep the bus busy and leave the rest of the GPU to other kernels.
_SWAP_PROGRAMS = 32


def copy_blocks(caches: Sequence[PagedKVCache], src_to_dst: BlockPairs) -> None:
    """Copies blocks within each of the caches, in all layers, with their index; on a GPU in the current stream.

    Raises:
        InternalError: a block outside of a cache, written twice, or both read and written.
    """
    pairs = _pairs(src_to_dst)
    for cache in caches:
        _check_pairs(pairs, cache, cache)
        if np.intersect1d(pairs[:, 0], pairs[:, 1]).size:
            raise InternalError("a block is both read and written", field="src_to_dst")
    if not len(pairs):
        return
    for cache in caches:
        for part in cache.blockwise:
            _move(part, part, pairs)


def swap_blocks(
    source: PagedKVCache, target: PagedKVCache, src_to_dst: BlockPairs, *, stream: "torch.cuda.Stream | None" = None
) -> None:
    """Copies blocks from one cache to another, in all layers, with their index. The source's blocks stay as they are.

    Between a GPU and a host cache in page-locked memory the host does not wait: the stream completes the copy, and the
    source's blocks must not change before. With pageable memory the host waits.

    Args:
        stream: stream of the GPU; None: the current one.

    Raises:
        InternalError: the caches differ in more than their number of blocks and their device, or a block is outside of
            its cache or written twice.
    """
    if source.spec != target.spec or _geometry(source) != _geometry(target):
        raise InternalError(
            f"blocks of {_geometry(source)}, {source.spec} do not fit into {_geometry(target)}, {target.spec}",
            field="target",
        )
    pairs = _pairs(src_to_dst)
    _check_pairs(pairs, source, target)
    if len(pairs):
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for from_part, to_part in zip(source.blockwise, target.blockwise, strict=True):
                _move(from_part, to_part, pairs)


def convert_kv(
    source_KBNHC: Tensor, target_KBNHC: Tensor, *, scale: Tensor | None = None, v_scale: Tensor | None = None
) -> None:
    """Writes one layer's numbers into another layer of the same shape and any layout, in the target's dtype.

    Args:
        scale, v_scale: float32 scalars on the device for the fp8 side: `scale` for keys or latents, `v_scale` for
            values. None is 1; if both sides are fp8, they share the scales.
    """
    if source_KBNHC.is_cuda:
        convert(source_KBNHC, target_KBNHC, scale=scale, v_scale=v_scale)
        return
    both = is_fp8(source_KBNHC) and is_fp8(target_KBNHC)
    for k, scale_k in zip(range(source_KBNHC.shape[0]), (None, None) if both else (scale, v_scale), strict=False):
        numbers = dequantize(source_KBNHC[k], scale_k, torch.float32)
        target_KBNHC[k].copy_(quantize(numbers, scale_k, target_KBNHC.dtype))


def _move(source: PagedKVCache, target: PagedKVCache, pairs: NDArray[np.int64]) -> None:
    source_OBX, target_OBX = source.by_block, target.by_block
    on_gpu = source_OBX.is_cuda or target_OBX.is_cuda
    if not on_gpu:
        target_OBX[:, pairs[:, 1]] = source_OBX[:, pairs[:, 0]]
        return
    for_the_kernel = pairs
    if not (source_OBX.is_cuda and target_OBX.is_cuda):
        runs = _adjacent(pairs)
        by_engine = runs[:, 2] * source_OBX.shape[2] >= _ENGINE_BYTES
        if not all(memory.is_cuda or memory.is_pinned() for memory in (source_OBX, target_OBX)):
            by_engine[:] = True
        for piece in _pieces(source_OBX, target_OBX, runs[by_engine]):
            piece[1].copy_(piece[0], non_blocking=True)
        for_the_kernel = _singles(runs[~by_engine])
    if len(for_the_kernel):
        device = source_OBX.device if source_OBX.is_cuda else target_OBX.device
        programs = None if source_OBX.device == target_OBX.device else _SWAP_PROGRAMS
        on_device = torch.from_numpy(for_the_kernel).to(device, non_blocking=True)
        copy(source_OBX, target_OBX, on_device, num_programs=programs)


def _pairs(src_to_dst: BlockPairs) -> NDArray[np.int64]:
    if isinstance(src_to_dst, Tensor):
        return src_to_dst.to(torch.int64).numpy().reshape(-1, 2)
    listed = [
        (source, target)
        for source, targets in src_to_dst.items()
        for target in ([targets] if isinstance(targets, int) else targets)
    ]
    return np.array(listed, dtype=np.int64).reshape(-1, 2)


def _check_pairs(pairs: NDArray[np.int64], source: PagedKVCache, target: PagedKVCache) -> None:
    for name, blocks, cache in (("source", pairs[:, 0], source), ("target", pairs[:, 1], target)):
        num_blocks = cache.shape.num_blocks
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < num_blocks:
            raise InternalError(
                f"{name} blocks from {blocks.min()} to {blocks.max()} of {num_blocks}", field="src_to_dst"
            )
    if len(np.unique(pairs[:, 1])) < len(pairs):
        raise InternalError("a block is written twice", field="src_to_dst")


def _geometry(cache: PagedKVCache) -> tuple[str, int]:
    return cache.shape.layout.name, cache.shape.block_size


def _adjacent(pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Runs of pairs whose blocks follow each other on both sides, as (first source, first target, number)."""
    ordered = pairs[np.argsort(pairs[:, 0], kind="stable")]
    follows = (np.diff(ordered, axis=0) == 1).all(axis=1)
    begins = np.flatnonzero(np.concatenate(([True], ~follows)))
    return np.column_stack((ordered[begins], np.diff(begins, append=len(ordered))))


def _singles(runs: NDArray[np.int64]) -> NDArray[np.int64]:
    """The pairs of such runs; the inverse of `_adjacent`."""
    counts = runs[:, 2]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    singles: NDArray[np.int64] = np.repeat(runs[:, :2], counts, axis=0) + within[:, None]
    return singles


def _pieces(source_OBX: Tensor, target_OBX: Tensor, runs: NDArray[np.int64]) -> Iterator[tuple[Tensor, Tensor]]:
    """Source and target of each run, once for each piece of memory outside of the blocks."""
    for outside in range(source_OBX.shape[0]):
        for first, to, count in runs.tolist():
            yield source_OBX[outside, first : first + count], target_OBX[outside, to : to + count]
