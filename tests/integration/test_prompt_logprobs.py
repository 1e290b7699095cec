"""Prompt logprobs from real processes equal one forward of transformers, wherever the prompt is computed."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.cli.processes import Process
from baton.client.client import AsyncClient
from baton.client.outputs import Completion
from baton.core.sampling import SamplingParams
from baton.core.types import Path as RequestPath
from tests.integration.cluster import DEEPSEEK, LLAMA, Machines, first_of, machines, nothing_held, until_status
from tests.integration.reference import Reference, References

TOLERANCE = 1e-3
ALTERNATIVES = 5
SAMPLING = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, prompt_logprobs=ALTERNATIVES)
NODE = {"num_blocks": 256, "max_batch_tokens": 64}


@pytest.fixture(
    scope="module", params=[LLAMA, pytest.param(DEEPSEEK, marks=pytest.mark.slow)], ids=["llama", "deepseek"]
)
def model(request: pytest.FixtureRequest) -> Path:
    chosen: Path = request.param
    return chosen


@pytest.fixture(scope="module")
def gateways(model: Path) -> Iterator[tuple[Process, Process]]:
    """Two gateways in front of one prefill and one decode node: policies strict and local."""
    with machines() as start:
        prefill, decode = start.nodes(
            ("prefill", {"model": model, **NODE}), ("decode", {"model": model, "block_size": 32, **NODE})
        )
        strict, local = (
            start.gateway([prefill], [decode], model=model, local_policy=policy) for policy in ("strict", "local")
        )
        yield strict, local


def assert_right(completion: Completion, prompt: list[int], reference: Reference) -> None:
    with torch.inference_mode():
        logprobs_TV = reference.model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    first, *others = completion.prompt_logprobs
    assert (first.token_id, first.logprob, first.top_logprobs) == (prompt[0], None, ())
    assert [each.token_id for each in others] == prompt[1:]
    places = torch.arange(len(others))
    expected = logprobs_TV[places, torch.tensor(prompt[1:])].tolist()
    assert [each.logprob for each in others] == pytest.approx(expected, abs=TOLERANCE)
    for each, best in zip(others, logprobs_TV[:-1].topk(ALTERNATIVES).values.tolist(), strict=True):
        assert [value for _, value in each.top_logprobs] == pytest.approx(best, abs=TOLERANCE)
    assert [token.token_id for token in completion.tokens] == reference.greedy(prompt, 4).token_ids


async def test_a_prefill_node_computes_every_position_even_if_the_decode_node_has_the_prompt(
    gateways: tuple[Process, Process], model: Path, references: References
) -> None:
    strict, _ = gateways
    reference = references[model]
    (prompt,) = reference.prompts([150])
    async with AsyncClient(strict.address) as client:
        sent = []
        for expected_cached in (0, 128):  # the second time, all full blocks are cached
            completion = await client.complete(prompt, SAMPLING, priority=-1)
            assert_right(completion, prompt, reference)
            assert completion.receipt.decode_cached_tokens == expected_cached
            assert completion.receipt.path is RequestPath.REMOTE
            assert completion.receipt.prefill_cached_tokens == completion.usage.cached_tokens == 0
            sent.append(completion.receipt.prompt_tokens_sent)
        assert sent == [150, 22]
        plain = await client.complete(prompt, replace(SAMPLING, prompt_logprobs=None))
        assert plain.prompt_logprobs == ()
        assert plain.receipt.prefill_cached_tokens > 0, "their KV is in the prefix cache"


async def test_a_decode_node_computes_every_position_of_a_cached_prompt_again(
    gateways: tuple[Process, Process], model: Path, references: References
) -> None:
    _, local = gateways
    reference = references[model]
    _, prompt = reference.prompts([1, 140])
    async with AsyncClient(local.address) as client:
        for _ in range(2):
            completion = await client.complete(prompt, SAMPLING)
            assert_right(completion, prompt, reference)
            assert (completion.receipt.path, completion.usage.cached_tokens) == (RequestPath.LOCAL, 0)


async def test_a_prompt_of_one_token_has_no_logprob(gateways: tuple[Process, Process]) -> None:
    for gateway in gateways:
        async with AsyncClient(gateway.address) as client:
            completion = await client.complete([7], SAMPLING)
            assert [(each.token_id, each.logprob) for each in completion.prompt_logprobs] == [(7, None)]


@pytest.mark.parametrize("survivor", ["prefill", "decode"])
async def test_a_client_gets_them_once_when_the_prefill_node_is_killed_half_way(
    start: Machines, reference: Reference, survivor: str
) -> None:
    held = {"model": LLAMA, **NODE}
    roles = ["prefill", "decode"] if survivor == "decode" else ["prefill", "prefill", "decode"]
    *prefills, decode = start.nodes(*((role, held) for role in roles), paused_engine=["prefill"])
    gateway = start.gateway(prefills, [decode], model=LLAMA)
    prompts = reference.prompts([200, 200])
    start.allow_steps(2, *prefills)
    async with AsyncClient(gateway.address) as client:
        requests = [asyncio.create_task(client.complete(prompt, SAMPLING)) for prompt in prompts]
        half_way = (200 - 2 * 64, 400 - 2 * 64)
        killed = await first_of(lambda node: until_status(node, lambda last: last.tokens_waiting in half_way), prefills)
        start.kill(killed)
        start.let_go(*(node for node in prefills if node is not killed))
        for prompt, completion in zip(prompts, await asyncio.gather(*requests), strict=True):
            assert_right(completion, prompt, reference)
    await until_status(decode, nothing_held)


@pytest.mark.slow
async def test_several_ranks_compute_them_together(start: Machines, reference: Reference) -> None:
    node = {"model": LLAMA, **NODE}
    prefill, decode = start.nodes(("prefill", {**node, "tensor_parallel_size": 2}), ("decode", node))
    gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="strict")
    (prompt,) = reference.prompts([150])
    async with AsyncClient(gateway.address) as client:
        for _ in range(2):
            assert_right(await client.complete(prompt, SAMPLING), prompt, reference)
