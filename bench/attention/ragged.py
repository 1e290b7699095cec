"""Prefills of prompts of very different lengths, 32 query heads on 8 of 128 channels: each backend over the prompts'
own keys, ours as it chooses, with one program per multiprocessor, and with one per tile."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from attention.backend import AttentionBackend
from attention.backends.triton_attn import TritonAttention
from attention.metadata import CommonAttentionMetadata, build_common_metadata
from attention.platform import Platform
from attention.selection import BACKENDS, BackendClass, reasons_against
from baton.kvcache.access import store_kv
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from bench.attention.batches import CHECKED_QUERIES, CHECKED_REQUESTS, Lengths, attend
from bench.attention.figures import MAX_ERROR, Goal, Work, rows_of
from bench.attention.gqa import HEAD_DIM, LAYER, NUM_HEADS, NUM_KV_HEADS, OURS, ROW_BYTES, SCALE, needs_of
from bench.attention.measure import Ceilings, microseconds, relative_error
from bench.table import Row

VARIANTS = {f"{OURS}, persistent": True, f"{OURS}, a program per tile": False}
BLOCK_SIZE = 16
GOALS = (Goal("FLASHINFER", 1.0),)


@dataclass(frozen=True)
class Prompts:
    """`name` has their number and the lengths of the shortest and longest."""

    name: str
    lens: tuple[int, ...]

    @property
    def pairs(self) -> int:
        return sum(length * (length + 1) // 2 for length in self.lens)


def spread(count: int, shortest: int, longest: int) -> Prompts:
    """Prompts whose lengths grow by equal factors, in random order."""
    factor = (longest / shortest) ** (1 / (count - 1))
    lens = [round(shortest * factor**index) for index in range(count)]
    random.Random(0).shuffle(lens)
    return Prompts(f"{count} prompts of {shortest} to {longest}", tuple(lens))


BATCHES = (spread(40, 8, 2000), spread(5, 37, 6007), spread(200, 8, 400), spread(8, 2048, 2048))


def run(platform: Platform, machine: Ceilings, progress: Callable[[str], None]) -> Iterator[Row]:
    for prompts in BATCHES:
        num_tokens = sum(prompts.lens)
        kv_bytes = num_tokens * 2 * NUM_KV_HEADS * HEAD_DIM * 2
        num_flops = 4 * prompts.pairs * NUM_HEADS * HEAD_DIM
        work = Work("ragged GQA prefill", prompts.name, kv_bytes + 2 * num_tokens * ROW_BYTES, num_flops)
        progress(f"attention: {work.name}, {work.size}")
        us_of = measure(prompts, platform, progress)
        for ours in (OURS, *VARIANTS):
            yield from rows_of(work, us_of, ours, GOALS, machine)


def measure(prompts: Prompts, platform: Platform, progress: Callable[[str], None]) -> dict[str, float]:
    """Microseconds by backend. Backends with wrong results are reported and left out."""
    us_of: dict[str, float] = {}
    candidates: dict[str, BackendClass] = {each.capabilities.name: each for each in BACKENDS}
    needs = replace(
        needs_of(Lengths(len(prompts.lens), max(prompts.lens), 0), BLOCK_SIZE), max_num_tokens=sum(prompts.lens)
    )
    fitting: dict[str, Callable[[], AttentionBackend]] = {
        name: partial(each, needs, platform, context_workspace_tokens=1)
        for name, each in candidates.items()
        if name != "BLOCKSPARSE_FLASH_ATTN" and not reasons_against(each.capabilities, needs, platform)
    }
    if platform.hopper_kernels:
        for name, persistent in VARIANTS.items():
            fitting[name] = partial(
                TritonAttention, needs, platform, context_workspace_tokens=1, persistent_prefills=persistent
            )
    common, num_blocks = _common(prompts)
    spec = KVCacheSpec(KVKind.GQA, 1, NUM_KV_HEADS, HEAD_DIM, "bfloat16")
    cache = PagedKVCache(spec, KVCacheShape(KVCacheLayout.NHD, BLOCK_SIZE, num_blocks), "cuda")
    q, k, v = (
        torch.randn(sum(prompts.lens), heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )
    for name, make in fitting.items():
        made, out = make(), torch.full_like(q, torch.nan)
        metadata = made.builder.build(0, common)
        store_kv(cache.layer(0), k, v, metadata.new_tokens)
        call = partial(made.forward, q, k, v, cache.layer(0), metadata, layer=LAYER, out=out)
        call()
        error, start = 0.0, 0
        for length in prompts.lens[:CHECKED_REQUESTS]:
            rows = slice(start + length - min(CHECKED_QUERIES, length), start + length)
            own = slice(start, start + length)
            error = max(error, relative_error(out[rows], attend(q[rows], k[own], v[own], scale=SCALE)))
            start += length
        if error < MAX_ERROR and bool(out.isfinite().all()):
            us_of[name] = microseconds([call])
        else:
            progress(f"attention: {name} is wrong by {error:.1e}: {prompts.name}")
    return us_of


def _common(prompts: Prompts) -> tuple[CommonAttentionMetadata, int]:
    """(Metadata with random blocks, number of blocks)."""
    counts = [-(-length // BLOCK_SIZE) for length in prompts.lens]
    dealt = iter(torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist())
    common, _ = build_common_metadata(
        query_lens=list(prompts.lens),
        context_lens=[0] * len(prompts.lens),
        block_tables=[[next(dealt) for _ in range(count)] for count in counts],
        block_size=BLOCK_SIZE,
        device="cuda",
    )
    return common, sum(counts)
