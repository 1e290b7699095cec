"""Block-sparse prefills of 8192 tokens, compared with the dense prefill's time multiplied by their density."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from attention.backend import AttentionFeature
from attention.backends.blocksparse import BlocksparseFlashAttention
from attention.backends.triton_attn import TritonAttention
from attention.blocksparse import BlocksparseParams
from attention.blocksparse_mask import block_mask, token_mask
from attention.parameters import AttentionParameters
from attention.platform import Platform
from attention.selection import BackendClass
from bench.attention.batches import Lengths, make_common
from bench.attention.figures import MAX_ERROR
from bench.attention.gqa import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, SCALE, needs_of
from bench.attention.measure import microseconds, relative_error
from bench.table import Row

LENGTHS = Lengths(2, 8192, 0)
PARAMS = BlocksparseParams(
    max_seqlen=8192, num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, block_size=64, local_blocks=16, vert_stride=8
)
PATTERNS = (PARAMS, replace(PARAMS, local_blocks=8, vert_stride=16))
MAX_RATIO = 1.3
CHECKED_QUERIES = 16


def run(platform: Platform, progress: Callable[[str], None]) -> Iterator[Row]:
    q, k, v = (
        torch.randn(LENGTHS.num_tokens, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )
    dense_us, _ = measure(TritonAttention, AttentionParameters(scale=SCALE), (q, k, v), platform)
    for params in PATTERNS:
        density = density_of(params)
        work = f"2 x 8192, {params.local_blocks} local blocks of 64, stripes every {params.vert_stride}"
        progress(f"attention: block-sparse prefill, {work}")
        layer = AttentionParameters(scale=SCALE, blocksparse=params)
        us, out = measure(BlocksparseFlashAttention, layer, (q, k, v), platform)
        error = error_of(out, params, (q, k, v))
        if error > MAX_ERROR:
            progress(f"attention: block-sparse prefill is wrong by {error:.1e}: {work}")
            continue
        work = f"{work}: density {density:.2f}, {us:.0f} us, dense {dense_us:.0f} us"
        yield Row("block-sparse prefill", work, us / (density * dense_us), "x density x dense", limit=MAX_RATIO)


def density_of(params: BlocksparseParams) -> float:
    """The computed share of the blocks that a dense causal prefill computes."""
    num_blocks = LENGTHS.seq_len // params.block_size
    return float(block_mask(params, num_blocks, num_blocks).mean(0).sum()) / (num_blocks * (num_blocks + 1) / 2)


def measure(
    backend: BackendClass, layer: AttentionParameters, qkv: tuple[Tensor, Tensor, Tensor], platform: Platform
) -> tuple[float, Tensor]:
    """(microseconds of one forward, what it gave)."""
    features = frozenset({AttentionFeature.BLOCK_SPARSE} if layer.blocksparse else ())
    needs = replace(needs_of(LENGTHS, block_size=64), features=features, layers={"layer": layer})
    made = backend(needs, platform, context_workspace_tokens=1)
    common = make_common(LENGTHS, block_size=64)
    metadata = made.builder.build(0, common)
    kv_layer = torch.empty(2, LENGTHS.num_tokens // 64, 64, NUM_KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    blocks = common.block_table_tensor.long().flatten()
    kv_layer[0, blocks], kv_layer[1, blocks] = (new.view(-1, 64, NUM_KV_HEADS, HEAD_DIM) for new in qkv[1:])
    out = torch.full_like(qkv[0], torch.nan)
    call = partial(made.forward, *qkv, kv_layer, metadata, layer=layer, out=out)
    return microseconds([call]), out


def error_of(out: Tensor, params: BlocksparseParams, qkv: tuple[Tensor, Tensor, Tensor]) -> float:
    """Of some queries of the first request."""
    positions = np.linspace(0, LENGTHS.seq_len - 1, CHECKED_QUERIES).astype(np.int64)
    seen_HTS = torch.from_numpy(token_mask(params, positions, LENGTHS.seq_len)).cuda()
    rows = torch.from_numpy(positions).cuda()
    q_THD = qkv[0][rows].float()
    k_SHD, v_SHD = (kv[: LENGTHS.seq_len].float().repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1) for kv in qkv[1:])
    scores_HTS = torch.einsum("thd,shd->hts", q_THD, k_SHD) * SCALE
    weights_HTS = scores_HTS.masked_fill(~seen_HTS, -torch.inf).softmax(-1)
    return relative_error(out[rows], torch.einsum("hts,shd->thd", weights_HTS, v_SHD))
