"""Decodes that share their first keys, 32 query heads on 8 of 128 channels: reading these once, and once for each row,
both as in captured steps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from attention.backends.triton_attn import TritonAttention
from attention.metadata import build_common_metadata
from attention.platform import Platform
from attention.prefix_group import new_prefix_group
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from bench.attention.batches import Lengths
from bench.attention.figures import MAX_ERROR
from bench.attention.gqa import HEAD_DIM, LAYER, NUM_HEADS, NUM_KV_HEADS, needs_of
from bench.attention.measure import microseconds, relative_error
from bench.table import Row

BLOCK_SIZE = 16
# Layers take turns, so that none finds its keys in the L2 cache.
LAYERS = 4
NUM_BLOCKS = 24576


@dataclass(frozen=True)
class Shared:
    """Rows, and the tokens that they share and that each has of its own."""

    rows: int
    shared: int
    own: int


CASES = (
    Shared(64, 8192, 512),
    Shared(32, 8192, 512),
    Shared(8, 8192, 512),
    Shared(8, 4096, 512),
    Shared(32, 2048, 512),
    Shared(64, 1024, 512),
    Shared(256, 512, 256),
    Shared(256, 2048, 256),
)


def run(platform: Platform, progress: Callable[[str], None]) -> Iterator[Row]:
    cache = PagedKVCache(
        KVCacheSpec(KVKind.GQA, LAYERS, NUM_KV_HEADS, HEAD_DIM, "bfloat16"),
        KVCacheShape(KVCacheLayout.NHD, BLOCK_SIZE, NUM_BLOCKS),
        torch.device("cuda"),
    )
    cache.storage.normal_()
    for case in CASES:
        progress(f"attention: {case}")
        yield measured(case, cache, platform)


def measured(case: Shared, cache: PagedKVCache, platform: Platform) -> Row:
    num_shared, num_own = case.shared // BLOCK_SIZE, case.own // BLOCK_SIZE
    blocks = torch.randperm(NUM_BLOCKS).tolist()
    stem, rest = blocks[:num_shared], blocks[num_shared:]
    common, _ = build_common_metadata(
        query_lens=[1] * case.rows,
        context_lens=[case.shared + case.own - 1] * case.rows,
        block_tables=[stem + rest[row * num_own :][:num_own] for row in range(case.rows)],
        block_size=BLOCK_SIZE,
        device="cuda",
    )
    needs = needs_of(Lengths(case.rows, 1, case.shared + case.own - 1), BLOCK_SIZE)
    backend = TritonAttention(needs, platform, context_workspace_tokens=0)
    costs = backend.builder.group_costs()
    assert costs is not None
    group = new_prefix_group(case.rows, common.block_table_tensor.shape[1], torch.device("cuda"))
    group.fill(range(case.rows), case.shared)
    q_THD = torch.randn(case.rows, NUM_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    us, outs = [], []
    for metadata in (backend.builder.build(0, common), backend.builder.build_with_prefix(common, group)):
        out = torch.empty_like(q_THD)

        calls = [
            partial(backend.forward, q_THD, None, None, cache.layer(layer), metadata, layer=LAYER, out=out)
            for layer in range(LAYERS)
        ]
        us.append(microseconds(calls))
        calls[0]()
        outs.append(out)
    assert relative_error(outs[1], outs[0]) < MAX_ERROR
    saved = costs.saved(num_rows=case.rows, span=case.rows, num_keys=case.shared)
    work = f"{case.rows} rows, {case.shared} shared and {case.own} own keys" + ("" if saved > 0 else ", not chosen")
    return Row("GQA decode, shared keys read once", work, us[1], "us", "by each row", us[0], less_is_better=True)
