"""Every key/value backend of this machine: each setting it declares, in each layout, block size and dtype, over ragged
batches, against attention by its definition in float64."""

from dataclasses import replace

import pytest
import torch

from attention.backend import AttentionFeature
from attention.parameters import AttentionType
from attention.selection import BackendClass
from baton.core.errors import InternalError
from baton.kvcache.layout import GQA_LAYOUTS, KVCacheLayout
from baton.kvcache.spec import KVKind
from tests.conformance.attention.batches import LONG, Batch
from tests.conformance.attention.captured import check_memory_stays_in_place, check_which_batches_replay
from tests.conformance.attention.gqa import LAYER, Shape, backend_of, gqa_case
from tests.conformance.attention.oracle import relative_error
from tests.conformance.attention.platform_backends import backend_name, backends_here, main_dtype
from tests.conformance.attention.selected import batches_of, block_sizes_of, combinations, settings_of
from tests.conformance.attention.settings import SETTINGS, Setting
from tests.device import DEVICE

BACKENDS = backends_here(KVKind.GQA)
WITH_CUDA_GRAPHS = [backend for backend in BACKENDS if backend.capabilities.cudagraph]
COMBINATIONS = [(backend, *combination) for backend in BACKENDS for combination in combinations(backend)]
LAYOUTS = [
    (backend, layout) for backend in BACKENDS for layout in GQA_LAYOUTS if layout in backend.capabilities.layouts
]
WITH_PARTIAL_RESULTS = [
    backend for backend in BACKENDS if backend.capabilities.name in ("TRITON_ATTN", "BLOCKSPARSE_FLASH_ATTN")
]
ANY_BLOCK_SIZE = [backend for backend in BACKENDS if backend.capabilities.block_sizes is None]
LAYERS_MAY_DIFFER = [backend for backend in BACKENDS if not backend.capabilities.uniform_layers]
ENCODER = frozenset({AttentionFeature.ENCODER})
ENCODERS_WITH_FP8 = [
    backend
    for backend in BACKENDS
    if backend.capabilities.features >= ENCODER and "float8_e4m3fn" in backend.capabilities.kv_dtypes
]
# Interpreted kernels see few sizes: a power of two, and two between.
HEAD_SIZES = [
    (backend, head_dim)
    for backend in BACKENDS
    for head_dim in (24, 32, 64, 80, 96, 128, 192, 256)
    if backend.capabilities.head_sizes is None or head_dim in backend.capabilities.head_sizes
    if DEVICE == "cuda" or head_dim in (24, 32, 80)
]
PLAIN = SETTINGS[0]

# Relative error of norms. Interpreted kernels truncate where a GPU rounds to bfloat16.
TOLERANCE = {"float32": 2e-5, "bfloat16": 8e-3, "float16": 1.5e-3}
# A few values between two fp8 numbers may be rounded the other way.
TOLERANCE_FP8 = {"float32": 2e-3, "bfloat16": 2e-2, "float16": 8e-3}


def name_of(value: object) -> str:
    match value:
        case KVCacheLayout():
            return value.label
        case Setting():
            return value.name.replace(" ", "_")
        case str() | int():
            return str(value)
        case _:
            return backend_name(value)


@pytest.mark.parametrize(("backend", "setting", "layout", "block_size", "dtype"), COMBINATIONS, ids=name_of)
def test_attention_equals_its_definition(
    backend: BackendClass, setting: Setting, layout: KVCacheLayout, block_size: int, dtype: str
) -> None:
    shape = Shape(layout=layout, block_size=block_size, dtype=dtype)
    made = backend_of(backend, setting, shape)
    tolerance = (TOLERANCE_FP8 if setting.kv_dtype else TOLERANCE)[dtype]
    for name, sizes in batches_of(backend, block_size, list(GQA_LAYOUTS).index(layout)).items():
        case = gqa_case(made, sizes, setting, shape)
        assert relative_error(case.run(), case.expected()) < tolerance, name


@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (7, 1), (16, 2)], ids=["one", "MHA", "MQA", "GQA"])
@pytest.mark.parametrize(("backend", "head_dim"), HEAD_SIZES, ids=name_of)
def test_head_counts_and_head_sizes(backend: BackendClass, heads: tuple[int, int], head_dim: int) -> None:
    dtype = main_dtype(backend.capabilities)
    shape = Shape(
        block_size=block_sizes_of(backend)[0],
        dtype=dtype,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
    )
    case = gqa_case(backend_of(backend, PLAIN, shape), [(1, 12), (1, 40), (9, 0), (5, 20)], PLAIN, shape)
    assert relative_error(case.run(), case.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", BACKENDS, ids=name_of)
def test_a_fast_build_changes_no_result(backend: BackendClass) -> None:
    shape = Shape(block_size=block_sizes_of(backend)[0], dtype=main_dtype(backend.capabilities))
    case = gqa_case(backend_of(backend, PLAIN, shape), [(1, 12), (1, 40), (9, 0), (5, 20)], PLAIN, shape)
    assert relative_error(case.run(fast_build=True), case.expected()) < TOLERANCE[shape.dtype]


@pytest.mark.parametrize("backend", WITH_PARTIAL_RESULTS, ids=name_of)
def test_a_layer_with_more_heads_than_the_backend_was_made_for_is_refused(backend: BackendClass) -> None:
    shape = Shape(dtype=main_dtype(backend.capabilities))
    made = backend_of(backend, PLAIN, replace(shape, num_heads=shape.num_heads // 2))
    with pytest.raises(InternalError, match=f"a layer has {shape.num_heads} heads of {shape.head_dim}"):
        gqa_case(made, [(1, 12)], PLAIN, shape).run()


@pytest.mark.parametrize("block_size", [1, 3, 8])
@pytest.mark.parametrize("backend", ANY_BLOCK_SIZE, ids=name_of)
def test_a_backend_for_any_block_size_takes_odd_ones(backend: BackendClass, block_size: int) -> None:
    shape = Shape(block_size=block_size, dtype=main_dtype(backend.capabilities))
    case = gqa_case(backend_of(backend, PLAIN, shape), [(1, 12), (1, 0), (9, 0), (5, 20)], PLAIN, shape)
    assert relative_error(case.run(), case.expected()) < TOLERANCE[shape.dtype]


@pytest.mark.parametrize("backend", LAYERS_MAY_DIFFER, ids=name_of)
def test_layers_that_ask_for_different_things_share_one_metadata(backend: BackendClass) -> None:
    settings = [setting for setting in settings_of(backend) if setting.causal and not setting.kv_dtype]
    shape = Shape(block_size=block_sizes_of(backend)[0], dtype=main_dtype(backend.capabilities))
    made = backend_of(backend, PLAIN, shape)
    metadata = None
    for setting in (*settings[:4], *settings[:1]):
        case = gqa_case(made, [(1, 12), (1, 40), (9, 0), (5, 20)], setting, shape)
        metadata = metadata or made.builder.build(0, case.batch.common)
        k_THD, v_THD = case.new_kv()
        out = case.layer(case.q_THD, k_THD, v_THD, case.cache, metadata)
        assert relative_error(out, case.expected()) < TOLERANCE[shape.dtype], setting.name


@pytest.mark.parametrize("backend", ENCODERS_WITH_FP8, ids=name_of)
def test_an_encoder_next_to_an_fp8_cache_uses_no_scales(backend: BackendClass) -> None:
    dtype = main_dtype(backend.capabilities)
    shape = Shape(block_size=block_sizes_of(backend)[0], dtype=dtype)
    setting = Setting("encoder", ENCODER, attn_type=AttentionType.ENCODER, kv_dtype="float8_e4m3fn")
    case = gqa_case(backend_of(backend, setting, shape), [(1, 0), (9, 0), (20, 0)], setting, shape)
    assert relative_error(case.run(), case.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("backend", BACKENDS, ids=name_of)
def test_long_contexts_split_over_many_programs(backend: BackendClass, name: str) -> None:
    dtype = main_dtype(backend.capabilities)
    shape = Shape(block_size=block_sizes_of(backend)[-1], dtype=dtype)
    case = gqa_case(backend_of(backend, PLAIN, shape), LONG[name], PLAIN, shape)
    assert relative_error(case.run(), case.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", BACKENDS, ids=name_of)
def test_decodes_replay_in_cuda_graphs_where_these_are_declared_and_prefills_never(backend: BackendClass) -> None:
    shape = Shape(block_size=block_sizes_of(backend)[0], dtype=main_dtype(backend.capabilities))
    check_which_batches_replay(backend_of(backend, PLAIN, shape), shape.block_size)


@pytest.mark.parametrize("backend", WITH_CUDA_GRAPHS, ids=name_of)
def test_a_captured_steps_memory_stays_in_place(backend: BackendClass) -> None:
    shape = Shape(block_size=block_sizes_of(backend)[0], dtype=main_dtype(backend.capabilities))
    check_memory_stays_in_place(backend_of(backend, PLAIN, shape), shape.block_size)


@pytest.mark.parametrize("backend", BACKENDS, ids=name_of)
def test_decodes_are_wanted_in_front(backend: BackendClass) -> None:
    shape = Shape(block_size=block_sizes_of(backend)[0], dtype=main_dtype(backend.capabilities))
    swaps: list[tuple[int, int]] = []
    builder = backend_of(backend, PLAIN, shape).builder
    assert builder.reorder_batch([3, 1], lambda first, second: swaps.append((first, second)))
    assert swaps == [(0, 1)]


@pytest.mark.parametrize(("backend", "layout"), LAYOUTS, ids=name_of)
def test_the_new_tokens_slots_are_written_and_no_other(backend: BackendClass, layout: KVCacheLayout) -> None:
    dtype = main_dtype(backend.capabilities)
    shape = Shape(layout=layout, block_size=block_sizes_of(backend)[0], dtype=dtype)
    case = gqa_case(backend_of(backend, PLAIN, shape), [(1, 12), (1, 0), (9, 0), (2, 15)], PLAIN, shape)
    before = case.cache.view.clone()
    case.run()
    for request, _, context_len in case.batch.requests():
        blocks, offsets = (tensor.to(DEVICE) for tensor in case.batch.slots(request, case.batch.seq_lens[request]))
        for which, kv in enumerate((case.k, case.v)):
            before[LAYER, which, blocks[context_len:], offsets[context_len:]] = kv[request][context_len:]
    torch.testing.assert_close(case.cache.view, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS, ids=name_of)
def test_padded_tokens_and_requests_change_nothing(backend: BackendClass) -> None:
    """As in a captured graph: rows past the actual tokens hold NaN, and their slots are -1."""
    dtype = main_dtype(backend.capabilities)
    shape = Shape(block_size=block_sizes_of(backend)[0], dtype=dtype)
    case = gqa_case(backend_of(backend, PLAIN, shape), [(1, 12), (1, 30), (9, 0), (2, 15)], PLAIN, shape)
    expected, common = case.expected(), case.batch.common
    zeros = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    common.slot_mapping = torch.cat((common.slot_mapping, zeros))
    common.__post_init__()
    k_THD, v_THD = case.new_kv()
    assert k_THD is not None
    assert v_THD is not None
    tensors = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 3), value=torch.nan) for t in (case.q_THD, k_THD, v_THD)]
    before = case.cache.view[:, :, unused_blocks(case.batch)].clone()
    out = case.layer(*tensors, case.cache, case.backend.builder.build(0, common))
    assert relative_error(out[: expected.shape[0]], expected) < TOLERANCE[dtype]
    torch.testing.assert_close(case.cache.view[:, :, unused_blocks(case.batch)], before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS, ids=name_of)
def test_queries_may_be_a_slice_of_a_wider_tensor_and_the_output_the_callers(backend: BackendClass) -> None:
    dtype = main_dtype(backend.capabilities)
    shape = Shape(block_size=block_sizes_of(backend)[0], dtype=dtype)
    case = gqa_case(backend_of(backend, PLAIN, shape), [(1, 12), (9, 0), (2, 15)], PLAIN, shape)
    contiguous = case.run()
    wide = torch.cat((case.q_THD, case.q_THD), dim=1)[:, : shape.num_heads]
    out = torch.full_like(contiguous, torch.nan)
    k_THD, v_THD = case.new_kv()
    metadata = case.backend.builder.build(0, case.batch.common)
    returned = case.layer(wide, k_THD, v_THD, case.cache, metadata, out=out)
    assert returned.data_ptr() == out.data_ptr()
    assert torch.equal(contiguous, out)


def unused_blocks(batch: Batch) -> list[int]:
    used = {block for blocks in batch.block_tables for block in blocks}
    return [block for block in range(batch.num_blocks) if block not in used]
