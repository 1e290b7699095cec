"""Every backend that offers batch invariance: a request's result has the same bits alone and in a batch, by the same
kernels that the rest of the suite finds right."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention.backend import AttentionBackend
from attention.metadata import CommonAttentionMetadata, build_common_metadata
from attention.selection import BackendClass
from baton.kvcache.spec import KVKind
from baton.models.kernels.matmul.matmul import multiply_heads_invariant, multiply_invariant
from baton.models.layers.linear import Linear
from tests.conformance.attention import gqa, mla
from tests.conformance.attention.batches import Batch
from tests.conformance.attention.gqa import Shape, gqa_case
from tests.conformance.attention.mla import DEEPSEEK, TINY, MLACase, MLAShape, mla_case
from tests.conformance.attention.oracle import relative_error
from tests.conformance.attention.platform_backends import PLATFORM, backend_name, backends_here
from tests.conformance.attention.settings import SETTINGS, Setting
from tests.device import DEVICE

ON_GPU = DEVICE == "cuda"
DTYPE = "bfloat16" if ON_GPU else "float32"
BOUND = 1.2e-2 if ON_GPU else 1e-5
# With every product exact and rounded to bfloat16 once, LONG is off by 2.6e-3, no request by more than 3.2e-3.
LATENT_BOUND = 5e-3 if ON_GPU else 1e-5
NAMES = ("plain", "window 7", "sinks", *(("chunks of 128", "soft cap", "ALiBi") if ON_GPU else ()))
ASKED = [setting for setting in SETTINGS if setting.name in NAMES]
# Decodes of one split and of several, a new sequence of one token, whole prompts, and chunks after a context.
SIZES = [(1, 530), (1, 0), (2, 3), (16, 24), (5, 34)]
LONG = [(1, 30000), (1, 5000), (1, 511), (1, 512), (700, 0), (2, 0), (300, 1000), (512, 4096), (33, 6000)]


def invariant_backends(kind: KVKind) -> list[BackendClass]:
    return [backend for backend in backends_here(kind) if backend.capabilities.batch_invariant]


def alone(batch: Batch, request: int) -> CommonAttentionMetadata:
    return part(batch, request, 0, batch.query_lens[request])


def part(batch: Batch, request: int, start: int, stop: int) -> CommonAttentionMetadata:
    """A batch of some of a request's new tokens; those before them are in the cache."""
    common, _ = build_common_metadata(
        query_lens=[stop - start],
        context_lens=[batch.context_lens[request] + start],
        block_tables=[batch.block_tables[request]],
        block_size=batch.block_size,
        device=DEVICE,
    )
    return common


def gqa_backend(backend: BackendClass, setting: Setting, shape: Shape) -> AttentionBackend:
    needs = replace(gqa.needs_of(setting, shape), batch_invariant=True, max_model_len=32768)
    return backend(needs, PLATFORM, context_workspace_tokens=256)


def mla_backend(backend: BackendClass, shape: MLAShape) -> AttentionBackend:
    needs = replace(mla.needs_of(shape), batch_invariant=True, max_model_len=32768)
    return backend(needs, PLATFORM, context_workspace_tokens=shape.workspace_tokens)


@pytest.mark.parametrize("setting", ASKED, ids=lambda setting: setting.name)
@pytest.mark.parametrize("backend", invariant_backends(KVKind.GQA), ids=backend_name)
def test_results_over_keys_and_values_are_equal_in_any_batch(backend: BackendClass, setting: Setting) -> None:
    shape = Shape(dtype=DTYPE)
    case = gqa_case(gqa_backend(backend, setting, shape), LONG if ON_GPU else SIZES, setting, shape)
    together = case.run()
    assert relative_error(together, case.expected()) < BOUND
    k_THD, v_THD = case.new_kv()
    assert k_THD is not None
    assert v_THD is not None
    for request, rows, _ in case.batch.requests():
        metadata = case.backend.builder.build(0, alone(case.batch, request))
        out: Tensor = case.layer(case.q_THD[rows], k_THD[rows], v_THD[rows], case.cache, metadata)
        assert torch.equal(out, together[rows]), (request, rows)


@pytest.mark.xdist_group("tens of GiB")  # the oracle of 128 heads: one at a time
@pytest.mark.parametrize("num_heads", [16, 128] if ON_GPU else [3])
@pytest.mark.parametrize("workspace_tokens", [8192, 1000] if ON_GPU else [20])
@pytest.mark.parametrize("backend", invariant_backends(KVKind.MLA), ids=backend_name)
def test_results_over_latents_are_equal_in_any_batch(
    backend: BackendClass, workspace_tokens: int, num_heads: int
) -> None:
    case = invariant_mla_case(backend, workspace_tokens, num_heads)
    together = case.run()
    assert relative_error(together, case.expected()) < LATENT_BOUND
    for request, rows, _ in case.batch.requests():
        assert torch.equal(attend_part(case, request, 0, case.batch.query_lens[request]), together[rows]), request


@pytest.mark.parametrize("num_heads", [8, 16, 32, 128] if ON_GPU else [3])
@pytest.mark.parametrize("backend", invariant_backends(KVKind.MLA), ids=backend_name)
def test_a_token_over_latents_has_the_same_bits_as_a_decode_and_in_any_chunk(
    backend: BackendClass, num_heads: int
) -> None:
    case = invariant_mla_case(backend, 1000, num_heads)
    together = case.run()
    for request, rows, _ in case.batch.requests():
        new = case.batch.query_lens[request]
        cuts = {
            (0, new),
            (0, new // 3),
            (new // 3, new),
            *((start, start + 1) for start in range(max(0, new - 9), new)),
        }
        for start, stop in cuts - {(0, 0)}:
            ours = attend_part(case, request, start, stop)
            assert torch.equal(ours, together[rows][start:stop]), (request, start, stop)


def invariant_mla_case(backend: BackendClass, workspace_tokens: int, num_heads: int) -> MLACase:
    dims = DEEPSEEK if ON_GPU else TINY
    shape = MLAShape(dtype=DTYPE, workspace_tokens=workspace_tokens, num_heads=num_heads, dims=dims)
    case = mla_case(mla_backend(backend, shape), LONG if ON_GPU else SIZES, shape)
    case.layer.multiply_heads = multiply_heads_invariant
    projection = Linear(dims.kv_lora_rank, case.layer.kv_b_proj.out_features, dtype=case.q_THD.dtype)
    projection.weight = case.layer.kv_b_proj.weight
    projection.multiply = multiply_invariant
    case.layer.kv_b_proj = projection
    return case


def attend_part(case: MLACase, request: int, start: int, stop: int) -> Tensor:
    """Attends with some of a request's new tokens, alone."""
    rank = case.shape.dims.kv_lora_rank
    metadata = case.layer.backend.builder.build(0, part(case.batch, request, start, stop))
    _, rows, context = list(case.batch.requests())[request]
    new_TC = case.latents[request][context + start : context + stop]
    out: Tensor = case.layer(case.q_THD[rows][start:stop], new_TC[:, :rank], new_TC[:, rank:], case.cache, metadata)
    return out
