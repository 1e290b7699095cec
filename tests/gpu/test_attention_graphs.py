"""Every backend that declares CUDA graphs: a decode step is captured once, and replayed with other lengths, blocks and
numbers of requests; each replay equals attention by its definition."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from attention.backend import AttentionBackend
from attention.metadata import CommonAttentionMetadata
from attention.selection import BackendClass
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.spec import KVKind
from tests.conformance.attention.batches import Batch
from tests.conformance.attention.gqa import Shape, backend_of, gqa_case
from tests.conformance.attention.mla import DEEPSEEK, MLAShape, mla_backend_of, mla_case
from tests.conformance.attention.oracle import relative_error
from tests.conformance.attention.platform_backends import backend_name, backends_here, main_dtype
from tests.conformance.attention.selected import block_sizes_of, settings_of
from tests.conformance.attention.settings import Setting

pytestmark = pytest.mark.gpu

PADDED_REQUESTS = 6
MAX_BLOCKS = 64
# Lengths before the new token. The first is the batch of the capture.
REPLAYS = ([1000] * PADDED_REQUESTS, [0, 5, 63, 64, 65, 700], [900, 17, 300], [3], [1001, 0, 31, 32, 33, 999])


@dataclass(frozen=True)
class StaticBatch:
    """The tensors that a captured graph reads, and the methods that fill them."""

    common: CommonAttentionMetadata

    def fill(self, batch: Batch) -> None:
        """Takes over a batch of decodes; the requests it lacks are padded: no tokens, slot -1, no block read."""
        ours, theirs, num_reqs = self.common, batch.common, batch.common.num_reqs
        ours.seq_lens.zero_()
        ours.seq_lens_cpu.zero_()
        ours.num_computed_tokens_cpu.zero_()
        ours.slot_mapping.fill_(-1)
        ours.block_table_tensor.zero_()
        for name in ("seq_lens", "seq_lens_cpu", "num_computed_tokens_cpu", "slot_mapping"):
            getattr(ours, name)[:num_reqs] = getattr(theirs, name)
        ours.block_table_tensor[:num_reqs, : theirs.block_table_tensor.shape[1]] = theirs.block_table_tensor


def static_batch() -> StaticBatch:
    starts_cpu = torch.arange(PADDED_REQUESTS + 1, dtype=torch.int32)
    lens_cpu = torch.ones(PADDED_REQUESTS, dtype=torch.int32)
    return StaticBatch(
        CommonAttentionMetadata(
            query_start_loc=starts_cpu.cuda(),
            query_start_loc_cpu=starts_cpu,
            seq_lens=lens_cpu.cuda(),
            seq_lens_cpu=lens_cpu,
            num_computed_tokens_cpu=torch.zeros_like(lens_cpu),
            num_reqs=PADDED_REQUESTS,
            num_actual_tokens=PADDED_REQUESTS,
            max_query_len=1,
            block_table_tensor=torch.zeros(PADDED_REQUESTS, MAX_BLOCKS, dtype=torch.int32, device="cuda"),
            slot_mapping=torch.full((PADDED_REQUESTS,), -1, dtype=torch.int64, device="cuda"),
        )
    )


def empty_cache(like: PagedKVCache) -> PagedKVCache:
    """With room for the largest batch."""
    return PagedKVCache(like.spec, replace(like.shape, num_blocks=MAX_BLOCKS * PADDED_REQUESTS + 3), "cuda")


def capture(backend: AttentionBackend, static: StaticBatch, call: Callable[[object], None]) -> torch.cuda.CUDAGraph:
    metadata = backend.builder.build_for_cudagraph_capture(static.common)
    call(metadata)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(metadata)
    return graph


def with_graphs(kind: KVKind) -> list[BackendClass]:
    return [backend for backend in backends_here(kind) if backend.capabilities.cudagraph]


GQA = [(backend, setting) for backend in with_graphs(KVKind.GQA) for setting in settings_of(backend) if setting.causal]


def name_of(value: object) -> str:
    if isinstance(value, Setting):
        return value.name.replace(" ", "_")
    return backend_name(value)


@pytest.mark.parametrize(("backend", "setting"), GQA, ids=name_of)
def test_a_captured_decode_replays_with_other_lengths(backend: BackendClass, setting: Setting) -> None:
    dtype = "bfloat16"
    assert dtype in backend.capabilities.dtypes
    shape = Shape(block_size=block_sizes_of(backend)[0], dtype=dtype, num_heads=8, num_kv_heads=2, head_dim=128)
    made, static = backend_of(backend, setting, shape), static_batch()
    first = gqa_case(made, [(1, length) for length in REPLAYS[0]], setting, shape)
    cache = empty_cache(first.cache)
    q, k, v = (torch.zeros(PADDED_REQUESTS, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2))
    out = torch.zeros_like(q)
    static.fill(first.batch)
    graph = capture(made, static, lambda metadata: first.layer(q, k, v, cache, metadata, out=out))
    for lengths in REPLAYS:
        case = gqa_case(made, [(1, length) for length in lengths], setting, shape)
        static.fill(case.batch)
        assert made.builder.can_run_in_cudagraph(static.common)
        made.builder.build(0, static.common)
        cache.storage.view(torch.uint8).fill_(0xFF)
        cache.view.view(torch.uint8)[:, :, : case.batch.num_blocks].copy_(case.cache.view.view(torch.uint8))
        _fill_rows(q, case.q_THD)
        new_k, new_v = case.new_kv()
        assert new_k is not None
        assert new_v is not None
        _fill_rows(k, new_k)
        _fill_rows(v, new_v)
        graph.replay()
        error = relative_error(out[: len(lengths)], case.expected())
        assert error < 8e-3, lengths


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("backend", with_graphs(KVKind.MLA), ids=name_of)
def test_a_captured_latent_decode_replays_with_other_lengths(backend: BackendClass, num_heads: int) -> None:
    shape = MLAShape(
        block_size=block_sizes_of(backend)[-1], dtype=main_dtype(backend.capabilities), num_heads=num_heads,
        dims=DEEPSEEK,
    )  # fmt: skip
    made, static = mla_backend_of(backend, shape), static_batch()
    first = mla_case(made, [(1, length) for length in REPLAYS[0]], shape)
    cache = empty_cache(first.cache)
    q = torch.zeros(PADDED_REQUESTS, num_heads, 192, dtype=first.q_THD.dtype, device="cuda")
    latents = torch.zeros(PADDED_REQUESTS, shape.latent_dim, dtype=q.dtype, device="cuda")
    out = torch.zeros(PADDED_REQUESTS, num_heads, DEEPSEEK.v_head_dim, dtype=q.dtype, device="cuda")
    static.fill(first.batch)
    rank = DEEPSEEK.kv_lora_rank

    def call(metadata: object) -> None:
        out.copy_(first.layer(q, latents[:, :rank], latents[:, rank:], cache, metadata))

    graph = capture(made, static, call)
    for lengths in REPLAYS:
        case = mla_case(made, [(1, length) for length in lengths], shape)
        static.fill(case.batch)
        assert made.builder.can_run_in_cudagraph(static.common)
        made.builder.build(0, static.common)
        cache.storage.view(torch.uint8).fill_(0xFF)
        cache.view[:, :, : case.batch.num_blocks].copy_(case.cache.view)
        _fill_rows(q, case.q_THD)
        _fill_rows(latents, torch.cat([rows[-1:] for rows in case.latents]))
        graph.replay()
        assert relative_error(out[: len(lengths)], case.expected()) < 1.2e-2, lengths


def _fill_rows(static: Tensor, rows: Tensor) -> None:
    """The padded rows hold NaN, which must not reach the others."""
    static.fill_(torch.nan)
    static[: rows.shape[0]] = rows
