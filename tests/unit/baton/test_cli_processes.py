"""Child processes report to `baton up` and end with it."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

import psutil
import pytest
from rich.console import Console

from baton.cli.cluster_log import ClusterLog
from baton.cli.processes import Process, Processes, Running
from baton.cli.progress import ClusterProgress
from baton.core.errors import ConfigError
from baton.core.supervisor import Supervisor
from baton.settings.environment import child_environment

CHILD = """
import signal, sys
from baton.core.supervisor import Supervisor
supervisor = Supervisor(sys.argv[-1])
if "fail" in sys.argv:
    raise SystemExit(3)
if "explain" in sys.argv:
    for stage in ("looking", "loading", "compiling"):
        supervisor.report(stage)
    supervisor.failed("the reason")
    raise SystemExit(2)
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "slow" in sys.argv:
    signal.pause()
supervisor.report("loading", done=1, total=4, address="127.0.0.1:1")
supervisor.report("ready")
if "leave" in sys.argv:
    raise SystemExit(4)
while True:
    signal.pause()
"""
# Starts a child, says so, and waits to be killed.
PARENT = """
import signal
from tests.unit.baton.test_cli_processes import start_child
from baton.cli.processes import Processes
with Processes(print, launch=start_child) as processes:
    children = [processes.start("node", words) for words in (["fine"], ["deaf"])]
    processes.wait_ready(children)
    print(*(child.pid for child in children), flush=True)
    signal.pause()
"""
DEADLINE_S = 120.0


def start_child(program: str, arguments: Sequence[str]) -> Running:
    return subprocess.Popen([sys.executable, "-c", CHILD, program, *arguments], env=child_environment())


def test_reports_arrive_in_order_and_the_last_one_counts() -> None:
    stages: list[tuple[str, int, int]] = []

    def note(processes: Sequence[Process]) -> None:
        stages.extend((process.stage, process.done, process.total) for process in processes)

    with Processes(print, launch=start_child, on_change=note) as processes:
        child = processes.start("node", [], name="prefill-0")
        processes.wait_bound([child])
        processes.wait_ready([child])
        assert child.address == "127.0.0.1:1"
    assert list(dict.fromkeys(stages)) in (
        [("starting", 0, 0), ("loading", 1, 4), ("ready", 0, 0)],
        [("starting", 0, 0), ("ready", 0, 0)],  # both reports were read at once
    )
    assert child.popen.poll() is not None


def test_a_child_that_ends_is_an_error_with_its_name_and_exit_code() -> None:
    with Processes(lambda line: None, launch=start_child) as processes:
        child = processes.start("node", ["fail"], name="decode-1")
        with pytest.raises(ConfigError, match="decode-1 ended with exit code 3"):
            processes.wait_ready([child])


def test_a_child_that_ends_right_after_its_reports_is_an_error_with_its_reason() -> None:
    with Processes(lambda line: None, launch=start_child) as processes:
        child = processes.start("node", ["explain"])
        child.popen.wait()  # none of its reports has been read
        with pytest.raises(ConfigError, match="the reason"):
            processes.wait_ready([child])


def test_a_child_that_ends_once_it_is_ready_is_an_error_while_others_start() -> None:
    with Processes(lambda line: None, launch=start_child) as processes:
        children = [processes.start("node", [word], name=word) for word in ("leave", "slow")]
        with pytest.raises(ConfigError, match="leave ended with exit code 4"):
            processes.wait_ready(children)


def test_children_end_when_their_parent_is_killed_even_if_they_ignore_sigterm() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=child_environment()
    )
    assert parent.stdout is not None
    try:
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(children) == 2
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=DEADLINE_S)
    assert alive == []


def test_a_process_ends_with_its_supervisor_whatever_its_log_pipe_does() -> None:
    reads, writes = full_pipe()

    def start(program: str, arguments: Sequence[str]) -> Running:
        command = [sys.executable, "-c", CHILD, program, *arguments]
        return subprocess.Popen(command, env=child_environment(), stderr=writes)

    processes = Processes(lambda line: None, launch=start)
    child = processes.start("node", ["deaf"])
    processes.wait_ready([child])
    processes.running.clear()  # it is not asked to end: only the connection to it is closed
    processes.__exit__(None, None, None)
    try:
        assert child.popen.wait(DEADLINE_S) == 1
    finally:
        child.popen.kill()
        os.close(reads)
        os.close(writes)


def full_pipe() -> tuple[int, int]:
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with suppress(BlockingIOError):
        while os.write(writes, bytes(1 << 12)):
            pass
    os.set_blocking(writes, True)
    return reads, writes


def test_a_process_whose_supervisor_has_ended_does_not_start() -> None:
    with pytest.raises(ConfigError, match="nothing listens"):
        Supervisor("baton-0-none")


def test_a_terminal_has_a_row_for_each_process_and_lines_above_them() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80, color_system=None)
    idle = subprocess.Popen([sys.executable, "-c", ""])
    idle.wait()
    with ClusterProgress(console) as shown:
        shown.update(
            [
                Process("prefill_node", "prefill-0", idle, stage="loading", done=1 << 30, total=4 << 30),
                Process("decode_node", "decode-0", idle, stage="compiling"),
            ]
        )
        shown.say("a line")
    last = written.getvalue().rpartition("baton: a line")[2]
    assert "prefill-0  loading" in last
    assert "1.0/4.0 GiB" in last
    assert "decode-0   compiling" in last


def test_with_a_log_usual_steps_of_the_start_are_left_out() -> None:
    written = io.StringIO()
    with ClusterProgress(Console(file=written), log=ClusterLog()) as shown:
        shown.note("prefill-0 serves on 127.0.0.1:1")
        shown.say("stopped")
    assert written.getvalue() == "baton: stopped\n"


def test_elsewhere_each_stage_is_one_plain_line() -> None:
    written = io.StringIO()
    idle = subprocess.Popen([sys.executable, "-c", ""])
    idle.wait()
    with ClusterProgress(Console(file=written)) as shown:
        node = Process("prefill_node", "prefill-0", idle, stage="loading")
        for node.done in (1, 2, 3):
            shown.update([node])
        node.stage = "compiling"
        shown.update([node])
    assert written.getvalue() == "baton: prefill-0: loading\nbaton: prefill-0: compiling\n"
