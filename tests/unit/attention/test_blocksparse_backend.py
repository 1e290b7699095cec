"""BLOCKSPARSE_FLASH_ATTN: mixed batches, dense layers between, lengths that change under a captured step, and
refusals."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention.backend import AttentionFeature, AttentionNeeds
from attention.backends.blocksparse import BlocksparseFlashAttention
from attention.blocksparse import BlocksparseParams
from attention.parameters import AttentionParameters
from attention.platform import probe_platform
from attention.selection import reasons_against
from baton.core.errors import ConfigError, InternalError
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.scales import KVScales
from baton.kvcache.spec import KVKind
from tests.device import DEVICE
from tests.unit.attention.sparse_twin import SparseCase, expected, make_case, relative_error

SCALE = 0.25
PARAMS = BlocksparseParams(max_seqlen=4096, num_heads=4, num_kv_heads=2, block_size=16, local_blocks=1, vert_stride=4)
LARGE_BLOCKS = replace(PARAMS, block_size=64, vert_stride=3)
PLATFORM = probe_platform(DEVICE)
NEEDS = AttentionNeeds(
    kind=KVKind.GQA,
    device=DEVICE,
    dtype="float32",
    head_size=16,
    block_size=16,
    layout=KVCacheLayout.NHD,
    features=frozenset({AttentionFeature.BLOCK_SPARSE}),
    num_heads=4,
    num_kv_heads=2,
    layers={"layer": AttentionParameters(scale=SCALE, blocksparse=PARAMS)},
)


def backend() -> BlocksparseFlashAttention:
    return BlocksparseFlashAttention(NEEDS, PLATFORM, context_workspace_tokens=1)


def forward(case: SparseCase, params: BlocksparseParams | None, scales: KVScales | None = None) -> Tensor:
    made = backend()
    out = torch.full_like(case.q_THD, torch.nan)
    k_THD, v_THD = case.new_kv()
    layer = AttentionParameters(scale=SCALE, blocksparse=params, scales=scales)
    metadata = made.builder.build(0, case.common)
    made.forward(case.q_THD, k_THD, v_THD, case.kv_layer, metadata, layer=layer, out=out)
    return out


@pytest.mark.parametrize("params", [PARAMS, LARGE_BLOCKS, None], ids=["small blocks", "large blocks", "dense"])
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [([1, 1, 30], [40, 0, 100]), ([1, 70, 20], [200, 0, 0]), ([1, 1], [3, 170])],
    ids=["decodes and a chunk", "a decode and whole prompts", "decodes alone"],
)
def test_mixed_batches_equal_the_reference(
    params: BlocksparseParams | None, query_lens: list[int], context_lens: list[int]
) -> None:
    case = make_case(query_lens=query_lens, context_lens=context_lens)
    assert relative_error(forward(case, params), expected(case, scale=SCALE, params=params)) < 2e-5


def test_a_batch_that_is_not_causal_is_refused() -> None:
    case = make_case(query_lens=[5], context_lens=[0])
    case.common.causal = False
    with pytest.raises(InternalError, match="not causal"):
        backend().builder.build(0, case.common)


def test_prompts_over_an_fp8_cache_read_the_rounded_numbers() -> None:
    case = make_case(query_lens=[1, 70], context_lens=[20, 0], kv_dtype="float8_e4m3fn")
    scales = KVScales(k_scale=0.5, v_scale=2.0).to(DEVICE)
    reference = expected(case, scale=SCALE, params=LARGE_BLOCKS, k_scale=0.5, v_scale=2.0)
    assert relative_error(forward(case, LARGE_BLOCKS, scales), reference) < 2e-5


def test_a_captured_decode_step_follows_lengths_that_change() -> None:
    made = backend()
    before = make_case(query_lens=[1, 1, 1], context_lens=[3, 90, 40])
    after = make_case(query_lens=[1, 1], context_lens=[150, 20], seed=1)
    common, q_THD = before.common, before.q_THD
    common.block_table_tensor = torch.zeros(3, 10, dtype=torch.int32, device=DEVICE)
    kv_layer, out = after.kv_layer, torch.full_like(q_THD, torch.nan)
    metadata = made.builder.build_for_cudagraph_capture(common)
    assert made.builder.can_run_in_cudagraph(common)
    layer = AttentionParameters(scale=SCALE, blocksparse=PARAMS)

    def step() -> None:
        made.forward(q_THD, None, None, kv_layer, metadata, layer=layer, out=out)

    replay = step
    if DEVICE == "cuda":
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay = graph.replay
    common.seq_lens.copy_(torch.tensor([151, 21, 0], dtype=torch.int32))
    common.block_table_tensor[:2] = after.common.block_table_tensor
    q_THD[:2] = after.q_THD
    replay()
    assert relative_error(out[:2], expected(after, scale=SCALE, params=PARAMS)) < 2e-5
    assert not out[2].any()


def test_batches_with_prefills_are_not_for_graphs() -> None:
    case = make_case(query_lens=[1, 2], context_lens=[3, 0])
    assert not backend().builder.can_run_in_cudagraph(case.common)


def test_decodes_are_brought_to_the_front() -> None:
    rows = ["prompt", "decode"]

    def swap(i: int, j: int) -> None:
        rows[i], rows[j] = rows[j], rows[i]

    assert backend().builder.reorder_batch([5, 1], swap)
    assert rows == ["decode", "prompt"]


@pytest.mark.parametrize("feature", sorted(set(AttentionFeature) - {AttentionFeature.BLOCK_SPARSE}))
def test_every_other_feature_is_refused(feature: AttentionFeature) -> None:
    needs = replace(NEEDS, features=NEEDS.features | {feature})
    assert not reasons_against(BlocksparseFlashAttention.capabilities, NEEDS, PLATFORM)
    assert reasons_against(BlocksparseFlashAttention.capabilities, needs, PLATFORM) == (f"no {feature}",)


@pytest.mark.parametrize(
    ("params", "field", "allowed"),
    [(replace(PARAMS, block_size=48), "block_size", "64"), (replace(PARAMS, num_heads=2), "blocksparse", "(4, 2)")],
)
def test_patterns_that_the_kernels_cannot_take_are_refused(params: BlocksparseParams, field: str, allowed: str) -> None:
    needs = replace(NEEDS, layers={"layer": AttentionParameters(scale=SCALE, blocksparse=params)})
    with pytest.raises(ConfigError) as refused:
        BlocksparseFlashAttention(needs, PLATFORM, context_workspace_tokens=1)
    assert refused.value.field == field
    assert any(allowed in item for item in refused.value.allowed)
