"""`cached_tokens` counts the prompt tokens that no node computed, and means the same at every door."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from baton.cli.processes import Process
from baton.client.client import AsyncClient
from baton.core.sampling import SamplingParams
from baton.core.types import Path
from baton.rpc.channels import connect
from tests.integration.cluster import DEADLINE_S, LLAMA, Flags, Machines, machines
from tests.integration.reference import Reference

NODE: Flags = {"model": LLAMA, "block_size": 16, "prefix_cache": True}
GREEDY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
CACHED = 96  # the full blocks of 100 tokens


@pytest.fixture(scope="module")
def start() -> Iterator[Machines]:
    with machines() as started:
        yield started


@pytest.fixture(scope="module")
def pair(start: Machines) -> tuple[Process, Process]:
    """A prefill node and a decode node, both with a prefix cache."""
    prefill, decode = start.nodes(("prefill", NODE), ("decode", NODE))
    return prefill, decode


@pytest.fixture(scope="module")
def strict(start: Machines, pair: tuple[Process, Process]) -> Process:
    """A gateway that has every prompt prefilled on the prefill node."""
    return start.gateway(pair[:1], pair[1:], model=LLAMA, local_policy="strict")


async def cached(gateway: Process, prompt: list[int], path: Path = Path.REMOTE) -> tuple[int, int, int]:
    """Of the prompt's tokens: those that no node computed, those of the prefill node's cache, the decode node's."""
    async with AsyncClient(gateway.address) as client:
        whole = await client.complete(prompt, GREEDY)
    assert whole.receipt.path is path
    return whole.usage.cached_tokens, whole.receipt.prefill_cached_tokens, whole.receipt.decode_cached_tokens


async def test_a_prefix_on_both_nodes_counts_once(strict: Process, reference: Reference) -> None:
    prompt = reference.prompts([100, 101, 102, 103])[0]
    assert await cached(strict, prompt) == (0, 0, 0)
    assert await cached(strict, prompt) == (CACHED, CACHED, CACHED)


async def test_a_prefix_on_the_prefill_node_only_counts(
    start: Machines, pair: tuple[Process, Process], reference: Reference
) -> None:
    prompt = reference.prompts([100, 101, 102, 103])[1]
    (empty,) = start.nodes(("decode", {**NODE, "prefix_cache": False}))
    gateway = start.gateway(pair[:1], [empty], model=LLAMA, local_policy="strict")
    assert await cached(gateway, prompt) == (0, 0, 0)
    assert await cached(gateway, prompt) == (CACHED, CACHED, 0)


async def test_a_prefix_on_the_decode_node_only_counts_where_it_saves_the_computation(
    start: Machines, pair: tuple[Process, Process], strict: Process, reference: Reference
) -> None:
    prompt = reference.prompts([100, 101, 102, 103])[2]
    local = start.gateway(pair[:1], pair[1:], model=LLAMA, local_policy="local")
    assert await cached(local, prompt, Path.LOCAL) == (0, 0, 0)
    assert await cached(local, prompt, Path.LOCAL) == (CACHED, 0, CACHED)
    assert await cached(strict, prompt) == (0, 0, CACHED), "the prefill node computed the whole prompt"


async def test_every_door_shows_a_hit_on_the_prefill_node(
    start: Machines, pair: tuple[Process, Process], reference: Reference
) -> None:
    prompt = reference.prompts([100, 101, 102, 103])[3]
    (empty,) = start.nodes(("decode", {**NODE, "prefix_cache": False}))
    gateway = start.gateway(pair[:1], [empty], model=LLAMA, local_policy="strict")
    assert await cached(gateway, prompt) == (0, 0, 0)
    assert await of_vllm(gateway, prompt) == CACHED
    completions = await post(gateway, "/v1/completions", {"prompt": prompt, "max_tokens": 1})
    assert completions["usage"]["prompt_tokens_details"]["cached_tokens"] == CACHED
    text = "word " * 100
    message = {"model": "llama", "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    seen = [(await post(gateway, "/v1/messages", message))["usage"]["cache_read_input_tokens"] for _ in range(2)]
    response = await post(gateway, "/v1/responses", {"model": "llama", "max_output_tokens": 1, "input": text})
    assert seen[0] == 0
    assert seen[1] == response["usage"]["input_tokens_details"]["cached_tokens"] > 0


async def post(gateway: Process, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{gateway.http}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )

    def ask() -> Any:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return json.load(answer)

    return await asyncio.to_thread(ask)


async def of_vllm(gateway: Process, prompt: list[int]) -> int:
    request = vllm.GenerateRequest(request_id="again", tokenized=vllm.TokenizedInput(input_ids=prompt))
    request.sampling_params.max_tokens = 1
    async with connect(gateway.address) as channel:
        answers = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request)
        last = [answer async for answer in answers][-1]
    return int(last.complete.cached_tokens)
