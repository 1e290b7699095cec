"""What a process of a node logs when it cannot go on, and its exit code."""

import logging
import pickle
import signal
import subprocess

import psutil
import pytest

from baton.core.errors import ConfigError, Draining
from baton.node.fault import Fault
from baton.node.ranks.stopped import StoppedFor


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (ConfigError("block_size is 0", field="block_size"), 2, "node: BATON_BLOCK_SIZE (--block-size) is 0"),
        (RuntimeError("CUDA out of memory."), 1, "the GPU has no memory left: CUDA out of memory."),
        (MemoryError(), 1, "no memory is left"),
        (ValueError("one\ntwo"), 1, "ValueError: one"),
        (Draining("rank 1 is gone"), 1, "Draining: rank 1 is gone"),
        (KeyboardInterrupt(), 0, "interrupted"),
        (SystemExit(3), 3, ""),
    ],
)
def test_each_fault_is_one_line_with_its_exit_code(
    error: BaseException,
    exit_code: int,
    line: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO, "baton")
    fault = Fault.of(error)
    fault.log("node")
    assert fault.exit_code == exit_code
    logged = [*(record.message for record in caplog.records), *capsys.readouterr().err.splitlines()]
    assert len(logged) == bool(line)
    assert "".join(logged).startswith(line)


def test_an_error_that_nobody_raises_on_purpose_has_its_traceback() -> None:
    with pytest.raises(ValueError, match="unexpected") as raised:
        raise ValueError("unexpected")
    assert "test_fault.py" in Fault.of(raised.value).lines
    assert Fault.of(ConfigError("wrong")).lines == ""


def test_rank_0_names_the_place_of_another_ranks_fault(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    for error in (ValueError("broke"), ConfigError("block_size is 0", field="block_size")):
        sent: Fault = pickle.loads(pickle.dumps(Fault.of(error).within("a step failed")))
        sent.within("rank 1").log("node")
    assert caplog.records[0].message == "rank 1: a step failed: ValueError: broke"
    assert capsys.readouterr().err == "node: rank 1: a step failed: BATON_BLOCK_SIZE (--block-size) is 0\n"


def test_a_process_that_a_signal_has_stopped_is_found_once_it_stays_so() -> None:
    with subprocess.Popen(["sleep", "infinity"]) as process:
        try:
            stopped = StoppedFor([process.pid])
            assert [stopped.first() for _ in range(3)] == [None] * 3
            process.send_signal(signal.SIGSTOP)
            while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                pass
            assert [stopped.first() for _ in range(3)] == [None, None, process.pid]
            process.send_signal(signal.SIGCONT)
            while psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                pass
            assert stopped.first() is None
        finally:
            process.kill()
