"""Every latent backend of this machine, in each layout, block size and dtype, over ragged batches, against attention by
its definition over the decompressed keys and values, in float64."""

import pytest
import torch
from torch import nn

from attention.backend import AttentionNeeds
from attention.backends.torch_sdpa import TorchSDPA
from attention.mla import MLAAttention
from attention.platform import Platform
from attention.selection import BackendClass
from baton.core.errors import ConfigError
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVKind
from tests.conformance.attention.batches import LONG
from tests.conformance.attention.captured import check_memory_stays_in_place, check_which_batches_replay
from tests.conformance.attention.mla import DEEPSEEK, LAYER, TINY, MLAShape, mla_backend_of, mla_case
from tests.conformance.attention.oracle import relative_error
from tests.conformance.attention.platform_backends import backend_name, backends_here, dtypes_here, main_dtype
from tests.conformance.attention.selected import batches_of, block_sizes_of, latent_combinations
from tests.device import DEVICE

BACKENDS = backends_here(KVKind.MLA)
WITH_CUDA_GRAPHS = [backend for backend in BACKENDS if backend.capabilities.cudagraph]
COMBINATIONS = [(backend, *combination) for backend in BACKENDS for combination in latent_combinations(backend)]
# Decodes round the query once more, when W_UK has gone into it.
TOLERANCE = {"float32": 2e-5, "bfloat16": 1.2e-2, "float16": 2e-3}
# Real head dims on a GPU: those that the library backends are written for.
DIMS = DEEPSEEK if DEVICE == "cuda" else TINY


def name_of(value: object) -> str:
    match value:
        case KVCacheLayout():
            return value.label
        case str() | int():
            return str(value)
        case _:
            return backend_name(value)


@pytest.mark.parametrize(("backend", "layout", "block_size", "dtype"), COMBINATIONS, ids=name_of)
def test_latent_attention_equals_its_definition(
    backend: BackendClass, layout: KVCacheLayout, block_size: int, dtype: str
) -> None:
    shape = MLAShape(layout=layout, block_size=block_size, dtype=dtype, dims=DIMS)
    made = mla_backend_of(backend, shape)
    place = dtypes_here(backend.capabilities).index(dtype)
    for name, sizes in batches_of(backend, block_size, place).items():
        case = mla_case(made, sizes, shape)
        assert relative_error(case.run(), case.expected()) < TOLERANCE[dtype], name


@pytest.mark.parametrize("num_heads", [16, 32, 64, 128] if DEVICE == "cuda" else [1, 4, 20])
@pytest.mark.parametrize("backend", BACKENDS, ids=name_of)
def test_any_number_of_heads_is_computed(backend: BackendClass, num_heads: int) -> None:
    dtype = main_dtype(backend.capabilities)
    shape = MLAShape(block_size=block_sizes_of(backend)[-1], dtype=dtype, num_heads=num_heads, dims=DIMS)
    case = mla_case(mla_backend_of(backend, shape), [(1, 12), (1, 130), (9, 0), (5, 20)], shape)
    assert relative_error(case.run(), case.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("backend", BACKENDS, ids=name_of)
def test_long_contexts_take_many_splits_and_many_workspaces(backend: BackendClass, name: str) -> None:
    dtype = main_dtype(backend.capabilities)
    shape = MLAShape(block_size=block_sizes_of(backend)[-1], dtype=dtype, dims=DIMS, workspace_tokens=256)
    case = mla_case(mla_backend_of(backend, shape), LONG[name], shape)
    assert relative_error(case.run(), case.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize("workspace_tokens", [1 if DEVICE == "cuda" else 7, 33, 64, 4096])
@pytest.mark.parametrize("backend", BACKENDS, ids=name_of)
def test_the_size_of_the_workspace_changes_nothing(backend: BackendClass, workspace_tokens: int) -> None:
    dtype = main_dtype(backend.capabilities)
    size = block_sizes_of(backend)[-1]
    shape = MLAShape(block_size=size, dtype=dtype, dims=DIMS, workspace_tokens=workspace_tokens)
    sizes = [(1, 70), (3, 69), (2, 0), (40, 7), (2, 30)]
    case = mla_case(mla_backend_of(backend, shape), sizes, shape)
    assert relative_error(case.run(), case.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", BACKENDS, ids=name_of)
def test_decodes_replay_in_cuda_graphs_where_these_are_declared_and_prefills_never(backend: BackendClass) -> None:
    shape = MLAShape(block_size=block_sizes_of(backend)[0], dtype=main_dtype(backend.capabilities), dims=DIMS)
    check_which_batches_replay(mla_backend_of(backend, shape), shape.block_size)


@pytest.mark.parametrize("backend", WITH_CUDA_GRAPHS, ids=name_of)
def test_a_captured_steps_memory_stays_in_place(backend: BackendClass) -> None:
    shape = MLAShape(block_size=block_sizes_of(backend)[0], dtype=main_dtype(backend.capabilities), dims=DIMS)
    check_memory_stays_in_place(mla_backend_of(backend, shape), shape.block_size)


@pytest.mark.parametrize("backend", BACKENDS, ids=name_of)
def test_decodes_are_wanted_in_front(backend: BackendClass) -> None:
    shape = MLAShape(block_size=block_sizes_of(backend)[0], dtype=main_dtype(backend.capabilities), dims=DIMS)
    swaps: list[tuple[int, int]] = []
    builder = mla_backend_of(backend, shape).builder
    assert builder.reorder_batch([3, 1], lambda first, second: swaps.append((first, second)))
    assert swaps == [(0, 1)]


@pytest.mark.parametrize("layout", [KVCacheLayout.LBNC, KVCacheLayout.BLNC], ids=name_of)
@pytest.mark.parametrize("backend", BACKENDS, ids=name_of)
def test_the_new_tokens_latents_are_written_and_no_others(backend: BackendClass, layout: KVCacheLayout) -> None:
    dtype = main_dtype(backend.capabilities)
    shape = MLAShape(layout=layout, block_size=block_sizes_of(backend)[0], dtype=dtype, dims=DIMS)
    case = mla_case(mla_backend_of(backend, shape), [(1, 12), (1, 0), (9, 0), (2, 15)], shape)
    before = case.cache.view.clone()
    case.run()
    for request, _, context_len in case.batch.requests():
        blocks, offsets = (tensor.to(DEVICE) for tensor in case.batch.slots(request, case.batch.seq_lens[request]))
        before[LAYER, 0, blocks[context_len:], offsets[context_len:], 0] = case.latents[request][context_len:]
    torch.testing.assert_close(case.cache.view, before, rtol=0, atol=0, equal_nan=True)


def test_a_layer_refuses_a_backend_for_another_kind_of_cache() -> None:
    needs = AttentionNeeds(KVKind.GQA, "cpu", "float32", 8, 4, KVCacheLayout.NHD)
    with pytest.raises(ConfigError, match="TORCH_SDPA reads caches of kind gqa"):
        MLAAttention(
            num_heads=1,
            qk_nope_head_dim=1,
            qk_rope_head_dim=1,
            v_head_dim=1,
            kv_lora_rank=1,
            scale=1.0,
            layer_index=0,
            kv_b_proj=nn.Linear(1, 2),
            backend=TorchSDPA(needs, Platform("cpu"), context_workspace_tokens=1),
        )
