"""Decodes that share their first keys: reading these once, and once for each row, both as in captured steps. GQA with
32 query heads on 8 of 128 channels, MLA with 16 and with 32 heads."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from attention.backend import AttentionNeeds
from attention.backends.triton_attn import TritonAttention
from attention.backends.triton_mla import TritonMLA
from attention.metadata import build_common_metadata
from attention.mla_cascade import LatentGroupCosts
from attention.platform import Platform
from attention.prefix_group import new_prefix_group
from attention.selection import BackendClass
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.spec import KVCacheShape, KVCacheSpec
from bench.attention import gqa, mla
from bench.attention.batches import Lengths
from bench.attention.figures import MAX_ERROR
from bench.attention.measure import microseconds, relative_error
from bench.table import Row

# Layers take turns, so that none finds its keys in the L2 cache.
LAYERS = 4
NUM_TOKENS = 24576 * 16


@dataclass(frozen=True)
class Shared:
    """Rows, and the tokens that they share and that each has of its own."""

    rows: int
    shared: int
    own: int


class Kind(NamedTuple):
    """A kind of attention and its cases."""

    backend: BackendClass
    needs_of: Callable[[Lengths], AttentionNeeds]
    cases: Sequence[Shared]


KINDS = (
    Kind(
        TritonAttention,
        partial(gqa.needs_of, block_size=16),
        (
            Shared(64, 8192, 512),
            Shared(32, 8192, 512),
            Shared(8, 8192, 512),
            Shared(8, 4096, 512),
            Shared(32, 2048, 512),
            Shared(64, 1024, 512),
            Shared(256, 512, 256),
            Shared(256, 2048, 256),
        ),
    ),
    Kind(
        TritonMLA,
        partial(mla.needs_of, 16),
        (
            Shared(64, 8192, 512),
            Shared(32, 8192, 512),
            Shared(8, 8192, 512),
            Shared(8, 32768, 512),
            Shared(64, 4096, 512),
            Shared(64, 2048, 512),
            Shared(256, 512, 256),
            Shared(256, 2048, 256),
        ),
    ),
    Kind(TritonMLA, partial(mla.needs_of, 32), (Shared(64, 8192, 512), Shared(256, 2048, 256))),
)


def run(platform: Platform, progress: Callable[[str], None]) -> Iterator[Row]:
    for kind in KINDS:
        needs = kind.needs_of(Lengths(1, 1, 0))
        cache = PagedKVCache(
            KVCacheSpec(needs.kind, LAYERS, needs.num_kv_heads, needs.head_size, needs.dtype),
            KVCacheShape(needs.layout, needs.block_size, NUM_TOKENS // needs.block_size),
            torch.device("cuda"),
        )
        cache.storage.normal_()
        for case in kind.cases:
            progress(f"attention: {needs.kind.name}, {case}")
            yield measured(kind, case, cache, platform)


def measured(kind: Kind, case: Shared, cache: PagedKVCache, platform: Platform) -> Row:
    needs = kind.needs_of(Lengths(case.rows, 1, case.shared + case.own - 1))
    num_shared, num_own = case.shared // needs.block_size, case.own // needs.block_size
    blocks = torch.randperm(cache.shape.num_blocks).tolist()
    stem, rest = blocks[:num_shared], blocks[num_shared:]
    common, _ = build_common_metadata(
        query_lens=[1] * case.rows,
        context_lens=[case.shared + case.own - 1] * case.rows,
        block_tables=[stem + rest[row * num_own :][:num_own] for row in range(case.rows)],
        block_size=needs.block_size,
        device="cuda",
    )
    backend = kind.backend(needs, platform, context_workspace_tokens=1)
    group = new_prefix_group(case.rows, common.block_table_tensor.shape[1], torch.device("cuda"))
    group.fill(range(case.rows), case.shared)
    q_THD = torch.randn(case.rows, needs.num_heads, needs.head_size, dtype=torch.bfloat16, device="cuda")
    num_values = needs.head_size if needs.mla is None else needs.mla.kv_lora_rank
    layer = needs.layers["layer"]
    us, outs = [], []
    for metadata in (backend.builder.build(0, common), backend.builder.build_with_prefix(common, group)):
        out = q_THD.new_empty(case.rows, needs.num_heads, num_values)
        calls = [
            partial(backend.forward, q_THD, None, None, cache.layer(index), metadata, layer=layer, out=out)
            for index in range(LAYERS)
        ]
        us.append(microseconds(calls))
        calls[0]()
        outs.append(out)
    assert relative_error(outs[1], outs[0]) < MAX_ERROR
    # Steps do not share latents by default, so their builder has no estimate.
    costs = backend.builder.group_costs() or LatentGroupCosts.of(needs, num_sms=platform.num_sms)
    saved = costs.saved(num_rows=case.rows, span=case.rows, num_keys=case.shared)
    work = f"{case.rows} rows, {case.shared} shared and {case.own} own keys" + ("" if saved > 0 else ", not chosen")
    name = f"{needs.kind.name} decode, {needs.num_heads} heads, shared keys read once"
    return Row(name, work, us[1], "us", "by each row", us[0], less_is_better=True)
