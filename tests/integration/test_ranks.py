"""Nodes of several ranks: any number on either side gives the same tokens, and all ranks end with their node."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import psutil
import pytest

from baton.cli.processes import Process
from baton.core.sampling import SamplingParams
from baton.core.supervisor import Supervisor
from baton.core.types import Path as RequestPath
from baton.node.ranks.group import start_ranks
from baton.security.roles import Role
from baton.settings.node_config import DecodeSettings
from tests.integration.cluster import (
    DEADLINE_S,
    DEEPSEEK,
    LLAMA,
    Machines,
    in_engine,
    machines,
    nothing_held,
    status,
    until_status,
)
from tests.integration.generation import Result, generate
from tests.integration.reference import Reference, References
from tests.integration.test_tokens import assert_same, bytes_per_token
from tests.warm_children import ranks_of

ROOT = Path(__file__).parents[2]
RANKS = (1, 2)
MAX_TOKENS = 12
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
NODE = {"num_blocks": 256, "max_batch_tokens": 64, "prefix_cache": False}
LENGTHS = [40, 129, 200]


def workers_of(node: Process) -> list[int]:
    """The processes of a node's ranks above 0."""
    return ranks_of(node.pid)


def until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not all(map(has_ended, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@dataclass(frozen=True)
class Cluster:
    """A prefill and a decode node of each number of ranks, all serving one model."""

    start: Machines
    model: Path
    prefill: dict[int, Process]
    decode: dict[int, Process]


@pytest.fixture(
    scope="module", params=[LLAMA, pytest.param(DEEPSEEK, marks=pytest.mark.slow)], ids=["llama", "deepseek"]
)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    model: Path = request.param
    roles = list(product(("prefill", "decode"), RANKS))
    with machines() as start:
        nodes = start.nodes(
            *(
                (role, {"model": model, "tensor_parallel_size": ranks, "block_size": 16 * ranks, **NODE})
                for role, ranks in roles
            )
        )
        by_role = dict(zip(roles, nodes, strict=True))
        yield Cluster(
            start,
            model,
            {ranks: by_role["prefill", ranks] for ranks in RANKS},
            {ranks: by_role["decode", ranks] for ranks in RANKS},
        )


def copies(model: Path, receivers: int) -> int:
    """Number of the decode node's ranks that get the same KV."""
    return receivers if model == DEEPSEEK else 1


@pytest.mark.slow
async def test_any_number_of_ranks_on_either_side_gives_the_same_tokens(
    cluster: Cluster, references: References
) -> None:
    model, start = cluster.model, cluster.start
    reference = references[model]
    prompts = reference.prompts(LENGTHS)
    expected = [reference.greedy(prompt, MAX_TOKENS) for prompt in prompts]
    for senders, receivers in product(RANKS, RANKS):
        prefill, decode = cluster.prefill[senders], cluster.decode[receivers]
        gateway = start.gateway([prefill], [decode], model=model, local_policy="strict")
        results = await asyncio.gather(*(generate(gateway, prompt, GREEDY) for prompt in prompts))
        for prompt, result, wanted in zip(prompts, results, expected, strict=True):
            assert_same(result, wanted, f"{senders} to {receivers} ranks, {len(prompt)} tokens")
            receipt = result.proof
            assert receipt.path is RequestPath.REMOTE
            assert receipt.prompt_tokens_sent == len(prompt)
            assert receipt.bytes_sent == len(prompt) * bytes_per_token(model) * copies(model, receivers)
            assert receipt.segments >= max(senders, receivers)
            assert receipt.transport not in ("", "loopback")
        start.end(gateway)
        await until_status(prefill, nothing_held)
        await until_status(decode, nothing_held)
    last = await status(cluster.decode[2])
    assert last.info.tensor_parallel_size == 2
    assert last.segments_refused == 0


async def test_sampled_tokens_are_those_of_one_rank(cluster: Cluster, references: References) -> None:
    """Each rank keeps its own state for editing logits, such as penalties."""
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0.9, seed=seed, ignore_eos=True, **extra)  # type: ignore[arg-type]
        for seed, extra in enumerate([{"top_k": 20}, {"repetition_penalty": 1.3}, {"top_p": 0.8, "logprobs": 2}])
    ]
    prompts = references[cluster.model].prompts([70, 33, 90])
    by_ranks = []
    for ranks in RANKS:
        gateway = cluster.start.gateway([], [cluster.decode[ranks]], model=cluster.model, local_policy="local")
        results = await asyncio.gather(*(generate(gateway, p, s) for p, s in zip(prompts, params, strict=True)))
        by_ranks.append([result.token_ids for result in results])
        cluster.start.end(gateway)
    assert by_ranks[0] == by_ranks[1]


async def test_ranks_end_with_their_node_however_it_ends(cluster: Cluster) -> None:
    """This test ends the nodes, so it is the last one that uses them."""
    killed, drained = cluster.prefill[2], cluster.decode[2]
    workers = [*workers_of(killed), *workers_of(drained)]
    assert len(workers) == 2
    cluster.start.kill(killed)
    assert cluster.start.end(drained) == 0
    until_gone(workers)


NODE_OF_SMALL_STEPS = {**NODE, "model": LLAMA, "max_batch_tokens": 16}
# Enough for the prompts and some tokens of each output, but not for all tokens of any output.
STEPS = 40


async def until_all_in(nodes: list[Process], count: int) -> None:
    """Returns when the engines of these held nodes have so many requests."""
    async with asyncio.timeout(DEADLINE_S):
        while sum([in_engine(await status(node)) for node in nodes]) < count:
            pass


@pytest.mark.slow
async def test_a_rank_that_dies_ends_its_node_and_its_requests_continue_elsewhere(
    start: Machines, reference: Reference
) -> None:
    prompts = reference.prompts([50, 60, 70, 80])
    long = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    ranked, single = start.nodes(
        ("decode", {**NODE_OF_SMALL_STEPS, "tensor_parallel_size": 2}),
        ("decode", NODE_OF_SMALL_STEPS),
        paused_engine=["decode"],
    )
    gateway = start.gateway([], [ranked, single], model=LLAMA, local_policy="local")
    results = [Result() for _ in prompts]
    requests = [
        asyncio.create_task(generate(gateway, prompt, long, result=result))
        for prompt, result in zip(prompts, results, strict=True)
    ]
    await until_all_in([ranked, single], len(prompts))
    start.allow_steps(STEPS, ranked, single)
    for result in results:
        await result.until_tokens(5)
    assert (await status(ranked)).requests_running > 0
    (worker,) = workers_of(ranked)
    os.kill(worker, signal.SIGKILL)
    start.let_go(single)
    await asyncio.gather(*requests)
    assert await asyncio.to_thread(ranked.popen.wait, DEADLINE_S) == 1
    until_gone([worker])
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == reference.greedy(prompt, 60).token_ids
    await until_status(single, nothing_held)


@pytest.mark.parametrize("python_path", ["", str(ROOT)])
def test_ranks_start_where_the_users_files_are_named_like_our_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python_path: str
) -> None:
    for name in ("attention.py", "psutil.py", "baton/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"raise RuntimeError('this is the user's {name}')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", python_path)
    settings = DecodeSettings.model_validate({"tensor_parallel_size": 2, "device": "cpu"})
    imported = False
    with start_ranks(settings, "decode_node", Role.DECODE, Supervisor(None)) as group:
        group.on_failure(lambda reason: None)
        with suppress(EOFError):
            imported = bool(group.meeting_place())
    assert imported, "the rank ended; its error is above"
