"""A rank that fails before its node serves, at whatever stage and however, ends the node, with the reason last.

The whole matrix of stages, ranks and ways is a sweep (`make test-sweeps`); `make test` has a sample of it.
"""

import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from baton.cli.processes import Processes
from baton.security.certificates import write_set
from tests.integration.broken_start import BROKEN, OF_RANK_0, ON_GPU, STAGES, StartFault, break_start, pids_in
from tests.integration.cluster import DEADLINE_S, LLAMA, Flags, arguments
from tests.integration.test_ranks import until_gone
from tests.integration.two_hosts import LOOPBACK, flags_of_both
from tests.warm import Forked, launch_warm, run_warm

NODE: Flags = {"model": LLAMA, "device": "cpu", "num_blocks": 64, "tensor_parallel_size": 2}
BY_ITSELF = {"error": (1, BROKEN), "setting": (2, BROKEN), "memory": (1, BROKEN)}
BY_OTHERS = {
    "exit": (1, "rank 1 (pid {}) ended with exit code 7: this node ends"),
    "kill": (1, "rank 1 (pid {}) was ended by SIGKILL: this node ends"),
    "stop": (1, "rank 1 (pid {}) is stopped by a signal (SIGSTOP) before it serves: this node ends"),
}
LEADER_CODES = {"exit": 7, "kill": -signal.SIGKILL}  # of a node whose rank 0 ends without a word


def failures(stderr: str) -> list[str]:
    """The lines about failures, without tracebacks. A rank that does not know yet may still say how far it is."""
    lines = [line for line in stderr.splitlines() if not line.startswith("    ")]
    return [line for line in lines if not re.search(" (INFO|WARNING) ", line)]


def check(fault: StartFault) -> None:
    """The node and all its processes end, with the right exit code, and the last line about a failure is the reason."""
    ended = run_warm("decode_node", *arguments(NODE), prepare=partial(break_start, fault))
    pids = pids_in(fault.pids)
    until_gone(pids)
    code, reason = {**BY_ITSELF, **BY_OTHERS}[fault.way]
    assert ended.returncode == code, ended.stderr
    lines = failures(ended.stderr)
    assert reason.format(pids[-1]) in lines[-1], ended.stderr
    assert sum(BROKEN in line for line in lines) == (fault.way in BY_ITSELF), ended.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_memory_for_its_weights_ends_its_node(rank: int, tmp_path: Path) -> None:
    check(StartFault("weights", rank, "memory", tmp_path))


def either(cases: list[tuple[Any, ...]], sample: set[tuple[Any, ...]]) -> list[Any]:
    """The cases of the matrix: those of the sample are slow, the others are swept."""
    assert sample <= set(cases)
    marked = ((case, pytest.mark.slow if case in sample else pytest.mark.sweep) for case in cases)
    return [pytest.param(*case, marks=mark) for case, mark in marked]


AT_ANY_RANK = [stage for stage in STAGES if stage not in OF_RANK_0 + ON_GPU]
RAISED = [*product(AT_ANY_RANK[1:], (0, 1)), *product(OF_RANK_0, (0,))]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "rank"), RAISED)
def test_an_error_at_any_stage_on_any_rank_ends_the_node(stage: str, rank: int, tmp_path: Path) -> None:
    check(StartFault(stage, rank, "error", tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "rank"), [*product(["settings", "transport"], (0, 1))])
def test_a_setting_that_one_rank_refuses_is_one_line(stage: str, rank: int, tmp_path: Path) -> None:
    check(StartFault(stage, rank, "setting", tmp_path))


GONE = either(
    list(product(AT_ANY_RANK, BY_OTHERS)),
    {*product(("import", "process group", "weights", "transport", "warm-up"), ("kill", "stop")), ("cache", "exit")},
)


@pytest.mark.parametrize(("stage", "way"), GONE)
def test_a_rank_that_is_gone_at_any_stage_ends_its_node(stage: str, way: str, tmp_path: Path) -> None:
    check(StartFault(stage, 1, way, tmp_path))


LEADER_GONE = either(
    list(product([*AT_ANY_RANK[1:], *OF_RANK_0], LEADER_CODES)),
    {*product(("process group", "weights", "warm-up", "ready"), ("kill",)), ("cache", "exit")},
)


@pytest.mark.parametrize(("stage", "way"), LEADER_GONE)
def test_no_rank_outlives_its_leader_at_any_stage(stage: str, way: str, tmp_path: Path) -> None:
    ended = run_warm("decode_node", *arguments(NODE), prepare=partial(break_start, StartFault(stage, 0, way, tmp_path)))
    until_gone(pids_in(tmp_path))
    assert ended.returncode == LEADER_CODES[way], ended.stderr


# ---- parents that end


def until_ranks(folder: Path, count: int) -> list[int]:
    deadline = time.monotonic() + DEADLINE_S
    while len(pids := pids_in(folder)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return pids


@pytest.mark.parametrize("stage", ["import", pytest.param("weights", marks=pytest.mark.slow)])
def test_a_rank_ends_with_its_leader_while_it_starts(stage: str, tmp_path: Path) -> None:
    """Also while it imports torch, which takes seconds, or longer from a slow disk."""
    fault = StartFault(stage, 1, "hang", tmp_path)
    leader = launch_warm("decode_node", arguments(NODE), prepare=partial(break_start, fault))
    pids = until_ranks(tmp_path, 2)
    leader.kill()
    until_gone(pids)


def test_a_node_ends_with_its_supervisor_while_it_waits_for_a_rank(tmp_path: Path) -> None:
    fault = StartFault("import", 1, "hang", tmp_path)
    with Processes(lambda line: None, launch=partial(launch_warm, prepare=partial(break_start, fault))) as processes:
        node = processes.start("decode_node", arguments(NODE))
        pids = until_ranks(tmp_path, 2)
        processes.running.remove(node)  # it is not asked to end: only the connection to it is closed
    until_gone(pids)


# ---- several hosts


@dataclass(frozen=True)
class Hosts:
    first: Forked
    second: Forked
    folders: tuple[Path, Path]

    def last_line(self, host: int) -> str:
        return failures((self.folders[host] / "stderr").read_text())[-1]


@contextmanager
def two_hosts(fault: StartFault, folder: Path) -> Iterator[Hosts]:
    certificates, *folders = (folder / name for name in ("certs", "first", "second"))
    for path in (certificates, *folders):
        path.mkdir()
    write_set(certificates, hosts=["127.0.0.1"], days=1)
    both = {**flags_of_both(certificates, LOOPBACK), "device": "cpu"}
    launch = partial(launch_warm, "decode_node")
    first = launch(arguments(both), prepare=partial(break_start, fault), outputs=folders[0])
    more = {**both, "host_rank": 1, "listen": f"{LOOPBACK.second}:0"}
    second = launch(arguments(more), prepare=partial(break_start, fault, leads=False), outputs=folders[1])
    try:
        yield Hosts(first, second, (folders[0], folders[1]))
    finally:
        first.kill()
        second.kill()


# Without "listen" on rank 0: the second host waits there for a host 0 that has not come yet.
ON_TWO_HOSTS = either(
    [
        *product(AT_ANY_RANK[1:], (0, 1), ("memory", "kill")),
        *product(AT_ANY_RANK[1:], (1,), ("stop",)),
        *product(("import",), (1,), ("kill", "stop")),
        *product(("ready",), (0,), ("memory", "kill")),
    ],
    {*product(("weights",), (0, 1), ("memory", "kill")), ("weights", 1, "stop"), ("warm-up", 1, "stop")},
)


@pytest.mark.parametrize(("stage", "rank", "way"), ON_TWO_HOSTS)
def test_a_rank_that_fails_on_one_host_ends_the_node_on_all(stage: str, rank: int, way: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    with two_hosts(StartFault(stage, rank, way, pids), tmp_path) as hosts:
        codes = hosts.first.wait(DEADLINE_S), hosts.second.wait(DEADLINE_S)
        assert codes == ((-signal.SIGKILL, 1) if (rank, way) == (0, "kill") else (1, 1))
        until_gone(pids_in(pids))
        if way == "memory":
            assert BROKEN in hosts.last_line(0)
        elif rank == 1:
            assert "rank 1 on host 127.0.0.1 is gone" in hosts.last_line(0)
        assert "this host's ranks end" in hosts.last_line(1)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["first", "second"])
def test_a_host_that_is_lost_while_the_model_loads_ends_the_node_on_the_other(lost: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    with two_hosts(StartFault("weights", 1, "hang", pids), tmp_path) as hosts:
        running = until_ranks(pids, 2)
        other = hosts.second if lost == "first" else hosts.first
        (hosts.first if lost == "first" else hosts.second).kill()
        assert other.wait(DEADLINE_S) == 1
        until_gone(running)
