"""Batches at a node's limits: 64 query heads and 200 ragged requests, by every backend, eager and captured."""

import random
from dataclasses import replace

import pytest
import torch

from attention.selection import BackendClass
from baton.kvcache.spec import KVKind
from tests.conformance.attention.gqa import Shape, gqa_case, needs_of
from tests.conformance.attention.oracle import relative_error
from tests.conformance.attention.platform_backends import PLATFORM, backend_name, backends_here
from tests.conformance.attention.selected import block_sizes_of
from tests.conformance.attention.settings import SETTINGS

pytestmark = pytest.mark.gpu

PLAIN = SETTINGS[0]
NUM_REQS = 200
DENSE = [backend for backend in backends_here(KVKind.GQA) if backend.capabilities.name != "BLOCKSPARSE_FLASH_ATTN"]


@pytest.mark.parametrize("heads", [(64, 8), (64, 64), (64, 1)], ids=["GQA", "MHA", "MQA"])
@pytest.mark.parametrize("kind", ["decodes", "prefills", "both"])
@pytest.mark.parametrize("backend", DENSE, ids=backend_name)
def test_two_hundred_ragged_requests_of_64_heads_equal_the_reference(
    backend: BackendClass, kind: str, heads: tuple[int, int]
) -> None:
    generator = random.Random(0)
    decodes = NUM_REQS if kind == "decodes" else NUM_REQS // 2 if kind == "both" else 0
    sizes = [(1, generator.randrange(600)) for _ in range(decodes)]
    sizes += [(generator.randrange(2, 120), generator.randrange(200)) for _ in range(NUM_REQS - decodes)]
    shape = Shape(
        block_size=block_sizes_of(backend)[0], dtype="bfloat16", num_heads=heads[0], num_kv_heads=heads[1], head_dim=128
    )
    needs = replace(needs_of(PLAIN, shape), max_num_reqs=NUM_REQS, max_num_tokens=sum(size[0] for size in sizes))
    made = backend(needs, PLATFORM, context_workspace_tokens=256)
    case = gqa_case(made, sizes, PLAIN, shape)
    expected = case.expected()
    assert relative_error(case.run(), expected) < 8e-3
    if decodes == NUM_REQS and backend.capabilities.cudagraph:
        metadata = made.builder.build_for_cudagraph_capture(case.batch.common)
        k_THD, v_THD = case.new_kv()
        case.layer(case.q_THD, k_THD, v_THD, case.cache, metadata)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = case.layer(case.q_THD, k_THD, v_THD, case.cache, metadata)
        made.builder.build(0, case.batch.common)
        graph.replay()
        assert relative_error(out, expected) < 8e-3
