"""Sparse latent attention of one layer at DeepSeek-V3.2's widths, selection included, compared with dense attention to
the same context: decodes and prefills, 128 heads, 512 + 64 channels, an indexer of 64 heads of 128, 2,048 tokens."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attention.backend import AttentionBackend, AttentionNeeds, MLAMetadata
from attention.backends.triton_mla import TritonMLA
from attention.mla import MLAAttention
from attention.platform import Platform
from attention.selection import fitting_backends
from attention.sparse import NOTHING_SELECTED, Selected
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from baton.models.layers.linear import Linear
from bench.attention.batches import Lengths, make_common
from bench.attention.measure import microseconds
from bench.attention.mla import BLOCK_SIZE, DIMS, LATENT_DIM, SCALE, needs_of
from bench.table import Row

NUM_HEADS, INDEX_HEADS, INDEX_DIM, TOP_K = 128, 64, 128, 2048
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
DECODE_ROWS = (1, 32)
PREFILL_TOKENS = 2048
# Tokens of context that a dense prefill decompresses at once: a node's default.
WORKSPACE_TOKENS = 4096


def run(platform: Platform, progress: Callable[[str], None]) -> Iterator[Row]:
    for context in CONTEXTS:
        for rows in DECODE_ROWS:
            progress(f"attention: sparse MLA decode, {rows} x {context}")
            yield measured("sparse MLA decode", Lengths(rows, 1, context - 1), platform)
        progress(f"attention: sparse MLA prefill, {PREFILL_TOKENS} after {context}")
        yield measured("sparse MLA prefill", Lengths(1, PREFILL_TOKENS, context), platform)


def measured(name: str, lengths: Lengths, platform: Platform) -> Row:
    """How many times as fast as dense attention; the work names the microseconds of each part."""
    needs = replace(needs_of(NUM_HEADS, lengths), mla=replace(DIMS, top_k=TOP_K))
    cache = _cache(lengths)
    common = make_common(lengths, BLOCK_SIZE)
    sparse = TritonMLA(needs, platform, context_workspace_tokens=WORKSPACE_TOKENS)
    metadata = sparse.builder.build(0, common)
    select = _selection(sparse, metadata, cache, lengths)
    layer = _layer(needs, sparse)
    inputs = _inputs(lengths)
    selected = select()
    select_us = microseconds([select])
    attend_us = microseconds([lambda: layer(*inputs, cache, metadata, selected=selected)])
    dense_needs = needs_of(NUM_HEADS, lengths)
    dense = fitting_backends(dense_needs, platform)[0](dense_needs, platform, context_workspace_tokens=WORKSPACE_TOKENS)
    of_all = _layer(dense_needs, dense)
    decodes = lengths.query_len == 1
    dense_metadata = dense.builder.build_for_cudagraph_capture(common) if decodes else dense.builder.build(0, common)
    dense_us = microseconds([lambda: of_all(*inputs, cache, dense_metadata, selected=NOTHING_SELECTED)])
    work = (
        f"{lengths.num_reqs} x {lengths.query_len}, context {lengths.context_len}: select {select_us:.0f} us, "
        f"attend {attend_us:.0f} us, dense {dense_us:.0f} us ({dense.capabilities.name})"
    )
    return Row(name, work, dense_us / (select_us + attend_us), "x dense")


def _selection(
    backend: TritonMLA, metadata: MLAMetadata, cache: PagedKVCache, lengths: Lengths
) -> Callable[[], Selected]:
    q_THD = torch.randn(lengths.num_tokens, INDEX_HEADS, INDEX_DIM, dtype=torch.bfloat16, device="cuda")
    weights_TH = torch.randn(lengths.num_tokens, INDEX_HEADS, device="cuda")
    decodes, prefills = metadata.sparse_decodes, metadata.sparse_prefills
    assert cache.index is not None
    index_layer = cache.index.layer(0)

    def select() -> Selected:
        if decodes is not None:
            return Selected(backend.select(q_THD, weights_TH, index_layer, decodes), None)
        assert prefills is not None
        return Selected(None, backend.select(q_THD, weights_TH, index_layer, prefills))

    return select


def _layer(needs: AttentionNeeds, backend: AttentionBackend) -> MLAAttention:
    with torch.device("cuda"):
        width = DIMS.qk_nope_head_dim + DIMS.v_head_dim
        projection = Linear(DIMS.kv_lora_rank, needs.num_heads * width, dtype=torch.bfloat16).requires_grad_(False)
        torch.nn.init.normal_(projection.weight, std=0.02)
    layer = MLAAttention(
        num_heads=needs.num_heads,
        qk_nope_head_dim=DIMS.qk_nope_head_dim,
        qk_rope_head_dim=DIMS.qk_rope_head_dim,
        v_head_dim=DIMS.v_head_dim,
        kv_lora_rank=DIMS.kv_lora_rank,
        scale=SCALE,
        layer_index=0,
        kv_b_proj=projection,
        backend=backend,
    )
    layer.process_weights_after_loading()
    return layer


def _inputs(lengths: Lengths) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, latents and rotary keys of the new tokens."""
    heads = DIMS.qk_nope_head_dim + DIMS.qk_rope_head_dim
    q_THD = torch.randn(lengths.num_tokens, NUM_HEADS, heads, dtype=torch.bfloat16, device="cuda")
    latent_TC = torch.randn(lengths.num_tokens, LATENT_DIM, dtype=torch.bfloat16, device="cuda")
    return q_THD, latent_TC[:, : DIMS.kv_lora_rank], latent_TC[:, DIMS.kv_lora_rank :]


def _cache(lengths: Lengths) -> PagedKVCache:
    index = KVCacheSpec(KVKind.MLA, 1, 1, INDEX_DIM, "bfloat16")
    spec = KVCacheSpec(KVKind.MLA, 1, 1, LATENT_DIM, "bfloat16", index=index)
    num_blocks = lengths.num_reqs * -(-lengths.seq_len // BLOCK_SIZE)
    cache = PagedKVCache(spec, KVCacheShape(KVCacheLayout.LBNC, BLOCK_SIZE, num_blocks), "cuda")
    for part in cache.parts:
        part.storage.normal_()
    return cache
