"""Prompts are prefilled on a prefill node, on the decode node, or in two parts, always with one process's tokens."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from baton.cli.processes import Process
from baton.client.operators import OperatorClient
from baton.client.outputs import Completion
from baton.core.costs import StepCosts, StepWork
from baton.core.sampling import SamplingParams
from baton.core.types import Grammar, GrammarKind, LocalPolicy, Path
from baton.engine.step_meter import StepMeter
from baton.gateway.fleet import fleet
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.fleet.placement import Placement, Route, place
from baton.gateway.fleet.router import RoutedRequest
from tests.integration.cluster import (
    DEADLINE_S,
    LLAMA,
    Flags,
    Machines,
    in_engine,
    machines,
    nothing_held,
    until_status,
)
from tests.integration.reference import Reference

NODE: Flags = {"model": LLAMA, "num_blocks": 256, "max_batch_tokens": 64}
DECODE: Flags = {**NODE, "local_prefill_tokens": 0}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def _split_all(decodes: Sequence[NodeView], prefills: Sequence[NodeView], wanted: RoutedRequest) -> Placement | None:
    """In place of the choice by costs: every prompt is split in its middle."""
    placement = place(decodes, prefills, replace(wanted, policy=LocalPolicy.STRICT))
    if placement is None:
        return None
    return replace(placement, route=Route.SPLIT, split_tokens=wanted.num_tokens // 64 * 32, reason="half of it")


def _known_costs(meter: StepMeter, work: StepWork, seconds: float) -> None:
    """In place of measuring: every step is known to cost 50 ms, on however slow a machine."""
    meter._costs = StepCosts(((1, 0.05), (64, 0.05)))


def know_costs() -> None:
    StepMeter.observe = _known_costs  # type: ignore[assignment, method-assign]


def choose_splits() -> None:
    vars(fleet)["place"] = _split_all


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Machines, Process, Process]]:
    with machines() as start:
        prefill, decode = start.nodes(("prefill", NODE), ("decode", {**DECODE, "block_size": 32}))
        yield start, prefill, decode


def assert_right(completion: Completion, prompt: list[int], reference: Reference, path: Path) -> None:
    assert [token.token_id for token in completion.tokens] == reference.greedy(prompt, 6).token_ids
    assert completion.receipt.path is path
    assert completion.receipt.prefill_s > 0


async def until_known(client: OperatorClient, *, waiting: Process, idle: Process) -> None:
    """Returns when the gateway knows that a whole prompt waits on one node, that the other one is idle, and both costs.

    Its older reports are of the requests before: with one of these it would choose another node.
    """
    async with asyncio.timeout(DEADLINE_S):
        while True:
            last = {report.address: report.status for report in (await client.cluster_status()).nodes}
            has_queue = last[waiting.address].backlog_s > 0 and last[waiting.address].tokens_waiting >= 400
            is_idle = in_engine(last[idle.address]) == 0 and last[idle.address].backlog_s == 0
            if has_queue and is_idle and all(len(status.step_costs.points) > 0 for status in last.values()):
                return
            await asyncio.sleep(0.005)


async def test_both_nodes_compute_a_part_of_a_split_prompt(
    nodes: tuple[Machines, Process, Process], reference: Reference
) -> None:
    start, prefill, decode = nodes
    gateway = start.gateway([prefill], [decode], model=LLAMA, prepare=choose_splits, local_policy="elastic")
    prompts = reference.prompts([300, 200, 131])
    async with OperatorClient(gateway.address) as client:
        completions = await asyncio.gather(*(client.complete(prompt, GREEDY) for prompt in prompts))
        for completion, prompt, split in zip(completions, prompts, (128, 96, 64), strict=True):
            assert_right(completion, prompt, reference, Path.SPLIT)
            receipt = completion.receipt
            assert (receipt.split_tokens, receipt.prompt_tokens_sent) == (split, split)
            assert receipt.why.endswith("half of it")
        # The decode node has the KV of both parts now: nothing is left to split.
        again = await client.complete(prompts[0], GREEDY)
        assert_right(again, prompts[0], reference, Path.LOCAL)
        assert again.usage.cached_tokens == 288
    for node in (prefill, decode):
        await until_status(node, nothing_held)


async def test_seeds_and_grammars_of_split_prompts_are_exact(
    nodes: tuple[Machines, Process, Process], reference: Reference
) -> None:
    start, prefill, decode = nodes
    (prompt,) = reference.prompts([180])
    drawn = SamplingParams(max_tokens=8, temperature=1.0, seed=11, ignore_eos=True)
    bound = replace(drawn, grammar=Grammar(GrammarKind.REGEX, "[0-9]{3}"), ignore_eos=False)
    outputs = []
    for prepare in (None, choose_splits):
        gateway = start.gateway([prefill], [decode], model=LLAMA, prepare=prepare, local_policy="elastic")
        async with OperatorClient(gateway.address) as client:
            salt = str(prepare)
            outputs.append([await client.complete(prompt, sampling, cache_salt=salt) for sampling in (drawn, bound)])
    assert [each.receipt.path for each in outputs[1]] == [Path.SPLIT, Path.LOCAL]  # the first has left its KV
    for whole, split in zip(*outputs, strict=True):
        assert [token.token_id for token in whole.tokens] == [token.token_id for token in split.tokens]


async def test_the_decode_node_computes_a_split_prompt_alone_when_the_prefill_node_dies(
    start: Machines, reference: Reference
) -> None:
    prefill, decode = start.nodes(("prefill", NODE), ("decode", DECODE), paused_engine=["prefill"])
    gateway = start.gateway([prefill], [decode], model=LLAMA, prepare=choose_splits, local_policy="elastic")
    (prompt,) = reference.prompts([300])
    async with OperatorClient(gateway.address) as client:
        request = asyncio.create_task(client.complete(prompt, GREEDY))
        start.allow_steps(1, prefill)
        await until_status(prefill, lambda last: last.requests_running == 1)
        start.kill(prefill)
        completion = await request
    assert_right(completion, prompt, reference, Path.LOCAL)
    assert "failed" in completion.receipt.why
    await until_status(decode, nothing_held)


async def test_a_decode_node_takes_prompts_while_the_prefill_node_has_a_queue(
    start: Machines, reference: Reference
) -> None:
    """The choice by costs that both nodes report. The prefill node is held, so its queue stays."""
    prefill, decode = start.nodes(
        ("prefill", {**NODE, "num_blocks": 1024}),
        ("decode", {**DECODE, "num_blocks": 1024}),
        paused_engine=["prefill"],
        prepare=know_costs,
    )
    elastic = start.gateway([prefill], [decode], model=LLAMA, tpot_ms=1e6, local_policy="elastic")
    remote = start.gateway([prefill], [decode], model=LLAMA, local_policy="strict")
    local = start.gateway([prefill], [decode], model=LLAMA, local_policy="local")
    first, second, third, queued = reference.prompts([400] * 4)
    async with (
        OperatorClient(elastic.address) as client,
        OperatorClient(remote.address) as strict,
        OperatorClient(local.address) as here,
    ):
        start.allow_steps(7, prefill)
        known = await asyncio.gather(strict.complete(first, GREEDY), here.complete(second, GREEDY))
        assert [each.receipt.path for each in known] == [Path.REMOTE, Path.LOCAL]
        for node in (prefill, decode):
            await until_status(node, lambda last: len(last.step_costs.points) > 0)
        waiting = asyncio.create_task(strict.complete(queued, GREEDY))
        await until_known(client, waiting=prefill, idle=decode)
        hurried = await client.complete(third, GREEDY, ttft_s=1e-6)
        assert_right(hurried, third, reference, Path.LOCAL)
        assert hurried.receipt.predicted_ttft_s is not None
        assert "to the first token" in hurried.receipt.why
        start.let_go(prefill)
        assert_right(await waiting, queued, reference, Path.REMOTE)
