"""The block-sparse kernels against their twin: any pattern, any context, any layout, padding, and every dtype."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attention.blocksparse import BlocksparseParams
from attention.kernels.blocksparse.decode import blocksparse_decode, decode_pieces, new_decode_partials
from attention.kernels.blocksparse.prefill import blocksparse_prefill, can_read_directly
from attention.platform import probe_platform
from baton.kvcache.layout import GQA_LAYOUTS, KVCacheLayout
from tests.device import DEVICE
from tests.unit.attention.sparse_twin import SparseCase, expected, make_case, relative_error

SCALE = 0.3
NAN_BYTE = 0xFF
PLATFORM = probe_platform(DEVICE)
HOPPER_SMS = PLATFORM.num_sms if PLATFORM.compute_capability == (9, 0) else None
BOUNDS = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.5e-2}


def params(num_heads: int = 4, num_kv_heads: int = 2, **changed: int | bool) -> BlocksparseParams:
    values: dict[str, Any] = {"block_size": 16, "local_blocks": 2, "vert_stride": 3, **changed}
    return BlocksparseParams(max_seqlen=4096, num_heads=num_heads, num_kv_heads=num_kv_heads, **values)


def prefill(
    case: SparseCase,
    pattern: BlocksparseParams | None,
    *,
    direct: bool = False,
    scale: float = SCALE,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    out = torch.full_like(case.q_THD, torch.nan)
    k_THD, v_THD = case.new_kv() if direct else (None, None)
    blocksparse_prefill(
        case.q_THD,
        case.kv_layer,
        k_THD=k_THD,
        v_THD=v_THD,
        query_start_loc=case.common.query_start_loc,
        seq_lens=case.common.seq_lens,
        block_table=case.common.block_table_tensor,
        max_query_len=case.common.max_query_len,
        scale=scale,
        params=pattern,
        k_scale=k_scale,
        v_scale=v_scale,
        out=out,
        hopper_sms=HOPPER_SMS,
    )
    return out


def decode(
    case: SparseCase,
    pattern: BlocksparseParams | None,
    *,
    pieces: int = 1,
    scale: float = SCALE,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    num_reqs, num_heads, head_dim = case.q_THD.shape
    out = torch.full_like(case.q_THD, torch.nan)
    blocksparse_decode(
        case.q_THD,
        case.kv_layer,
        seq_lens=case.common.seq_lens,
        block_table=case.common.block_table_tensor,
        pieces=pieces,
        partials=new_decode_partials(
            num_heads=num_heads,
            num_kv_heads=case.kv_layer.shape[3],
            head_size=head_dim,
            num_sms=num_reqs * pieces,
            device=torch.device(DEVICE),
        ),
        scale=scale,
        params=pattern,
        k_scale=k_scale,
        v_scale=v_scale,
        out=out,
    )
    return out


PATTERNS = {
    "each head slides": params(),
    "many heads share few stripes": params(4, 1, vert_stride=2),
    "heads slide by several blocks": params(2, 1, vert_stride=7),
    "homogeneous": params(homo_head=True),
    "along kv heads": params(homo_head_group=True),
    "second rank of two": params(tp_rank=1, tp_size=2),
    "along kv heads, second rank": params(homo_head_group=True, tp_rank=1, tp_size=2),
    "stripes alone": params(local_blocks=0),
    "one local block": params(local_blocks=1, vert_stride=5),
    "local blocks alone": params(local_blocks=3, vert_stride=1000, homo_head=True),
    "every block": params(vert_stride=1),
    "large blocks": params(block_size=128, local_blocks=1, vert_stride=2),
    "medium blocks": params(block_size=64, local_blocks=1, vert_stride=2),
    "dense": None,
}


def shape_of(pattern: BlocksparseParams | None) -> dict[str, Any]:
    """In 16 bits and with heads of 64, so that a Hopper GPU takes its own kernel."""
    shape = {"dtype": "float16", "head_dim": 64}
    return shape if pattern is None else shape | {"num_heads": pattern.num_heads, "num_kv_heads": pattern.num_kv_heads}


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_prefills_equal_their_twin_with_and_without_context(pattern: BlocksparseParams | None) -> None:
    case = make_case(query_lens=[70, 20], context_lens=[0, 130], **shape_of(pattern))
    out = prefill(case, pattern)
    assert relative_error(out, expected(case, scale=SCALE, params=pattern)) < BOUNDS["float16"]


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_decodes_equal_their_twin(pattern: BlocksparseParams | None) -> None:
    case = make_case(query_lens=[1, 1], context_lens=[15, 270], **shape_of(pattern))
    out = decode(case, pattern)
    assert relative_error(out, expected(case, scale=SCALE, params=pattern)) < BOUNDS["float16"]


@pytest.mark.parametrize("pieces", [2, 7])
def test_decodes_may_have_empty_pieces(pieces: int) -> None:
    pattern = PATTERNS["each head slides"]
    case = make_case(query_lens=[1, 1, 1], context_lens=[0, 15, 270], **shape_of(pattern))
    out = decode(case, pattern, pieces=pieces)
    assert relative_error(out, expected(case, scale=SCALE, params=pattern)) < BOUNDS["float16"]


@pytest.mark.parametrize("name", ["large blocks", "medium blocks", "dense"])
def test_prefill_of_its_own_keys_reads_no_cache(name: str) -> None:
    pattern = PATTERNS[name]
    case = make_case(query_lens=[5, 150], context_lens=[0, 0], **shape_of(pattern))
    reference = expected(case, scale=SCALE, params=pattern)
    case.kv_layer.view(torch.uint8).fill_(NAN_BYTE)
    assert can_read_directly(case.new_kv()[0], pattern)
    assert relative_error(prefill(case, pattern, direct=True), reference) < BOUNDS["float16"]


def test_direct_reading_wants_large_blocks_and_aligned_rows() -> None:
    keys = torch.zeros(8, 2, 16, device=DEVICE)
    assert can_read_directly(keys, params(block_size=64))
    assert not can_read_directly(keys, params(block_size=32))
    assert not can_read_directly(torch.zeros(8, 2, 17, device=DEVICE)[..., 1:], params(block_size=64))


@pytest.mark.parametrize("layout", GQA_LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_and_a_block_size_that_is_no_power_of_two(layout: KVCacheLayout) -> None:
    case = make_case(query_lens=[1, 20], context_lens=[40, 20], layout=layout, block_size=12)
    reference = expected(case, scale=SCALE, params=params())
    assert relative_error(prefill(case, params()), reference) < BOUNDS["float32"]
    decodes = make_case(query_lens=[1], context_lens=[70], layout=layout, block_size=12)
    assert relative_error(decode(decodes, params()), expected(decodes, scale=SCALE, params=params())) < 2e-5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_16_bit_types_and_head_sizes_equal_their_twin(dtype: str, head_dim: int) -> None:
    pattern = params(2, 1, block_size=16)
    case = make_case(query_lens=[20], context_lens=[60], num_heads=2, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    reference = expected(case, scale=0.1, params=pattern)
    assert relative_error(prefill(case, pattern, scale=0.1), reference) < BOUNDS[dtype]
    decodes = make_case(query_lens=[1], context_lens=[80], num_heads=2, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    reference = expected(decodes, scale=0.1, params=pattern)
    assert relative_error(decode(decodes, pattern, pieces=2, scale=0.1), reference) < BOUNDS[dtype]


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_an_fp8_cache_is_read_with_its_scales(kv_dtype: str) -> None:
    scales = {"k_scale": 0.7, "v_scale": 1.6}
    tensors: dict[str, Any] = {name: torch.tensor(value, device=DEVICE) for name, value in scales.items()}
    case = make_case(query_lens=[3, 20], context_lens=[10, 60], kv_dtype=kv_dtype)
    reference = expected(case, scale=SCALE, params=params(), **scales)
    assert relative_error(prefill(case, params(), **tensors), reference) < BOUNDS["float32"]
    decodes = make_case(query_lens=[1], context_lens=[70], kv_dtype=kv_dtype)
    reference = expected(decodes, scale=SCALE, params=params(), **scales)
    assert relative_error(decode(decodes, params(), pieces=2, **tensors), reference) < BOUNDS["float32"]


def test_padding_is_neither_read_nor_written() -> None:
    case = make_case(query_lens=[9, 1, 4], context_lens=[30, 0, 0])
    reference = expected(case, scale=SCALE, params=params())
    case.common.seq_lens[1] = 0
    case.common.block_table_tensor[1] = 2**30
    out = prefill(case, params())
    assert out[9].isnan().all()
    kept = [*range(9), *range(10, 14)]
    assert relative_error(out[kept], reference[kept]) < BOUNDS["float32"]


def test_prompts_after_decodes_leave_those_alone() -> None:
    """As a mixed batch's, whose decodes are more than some tiles have queries."""
    pattern = PATTERNS["each head slides"]
    case = make_case(query_lens=[*[1] * 600, 70, 20], context_lens=[*[3] * 600, 0, 130], **shape_of(pattern))
    out = torch.full_like(case.q_THD, torch.nan)
    blocksparse_prefill(
        case.q_THD,
        case.kv_layer,
        query_start_loc=case.common.query_start_loc[600:],
        seq_lens=case.common.seq_lens[600:],
        block_table=case.common.block_table_tensor[600:],
        max_query_len=case.common.max_query_len,
        scale=SCALE,
        params=pattern,
        out=out,
        hopper_sms=HOPPER_SMS,
    )
    assert out[:600].isnan().all()
    assert relative_error(out[600:], expected(case, scale=SCALE, params=pattern)[600:]) < BOUNDS["float16"]


@pytest.mark.parametrize("pieces", [1, 2])
def test_decode_of_a_padded_request_is_zero(pieces: int) -> None:
    case = make_case(query_lens=[1, 1], context_lens=[70, 5])
    reference = expected(case, scale=SCALE, params=params())
    case.common.seq_lens[1] = 0
    case.common.block_table_tensor[1] = 2**30
    out = decode(case, params(), pieces=pieces)
    assert not out[1].any()
    assert relative_error(out[:1], reference[:1]) < BOUNDS["float32"]


def test_pieces_fill_the_gpu_and_fit_their_memory() -> None:
    for num_reqs in range(1, 300):
        pieces = decode_pieces(num_reqs=num_reqs, num_kv_heads=8, num_sms=132)
        partials = new_decode_partials(
            num_heads=8, num_kv_heads=8, head_size=16, num_sms=132, device=torch.device("cpu")
        )
        assert pieces == 1 or pieces * num_reqs <= partials.lse2.shape[0]
        assert pieces * num_reqs * 8 > 132
