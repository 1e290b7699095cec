"""The bounded process: its forks work on questions, and a bound of CPU time, memory or time ends a fork.

`baton.bounded.process` starts it. A fork waits at the end of each lane, works on one question after another, and is
replaced when it ends. Messages of a lane are JSON objects; a question's content comes in a memory file, because a
message has a maximum size, and the answer's content replaces it there.
"""

import ctypes
import gc
import json
import mmap
import os
import resource
import signal
import socket
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from baton.core.errors import BatonError, InternalError, InvalidRequest

Answer = dict[str, Any]
# Maps a question's fields and content to the content of its answer.
Work = Callable[[Mapping[str, Any], bytes], bytes]

_MESSAGE_BYTES_MAX = 4096
# A fork is replaced after this many questions, so that what libraries keep of them stays small.
_QUESTIONS_OF_A_FORK = 200
_NUMBER_BYTES = 8
_LANE_CLOSED = 3
_NICE = 10  # for each lane after the first, whose questions take long
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4


def serve(arguments: list[str], make_work: Callable[[Any], Work]) -> None:
    """Serves until the other end of a lane is closed, or the parent ends.

    Args:
        arguments: those of the command line, which `baton.bounded.process` writes.
        make_work: given the facts that all questions share; called before the first fork.
    """
    parent, facts_fd, *lane_fds = map(int, arguments)
    end_with(parent)
    for of_terminal in (signal.SIGINT, signal.SIGTERM):
        signal.signal(of_terminal, signal.SIG_IGN)
    with open(facts_fd, "rb") as file:
        work = make_work(json.loads(file.read()))
    gc.collect()
    gc.freeze()  # forks then share the memory
    lanes = [_Lane(fd, work, nice=_NICE * number) for number, fd in enumerate(lane_fds)]
    forks = {lane.fork(): lane for lane in lanes}
    while True:
        pid, status = os.wait()
        lane = forks.pop(pid)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _LANE_CLOSED:
            return
        lane.report_death(status)
        forks[lane.fork()] = lane


def end_with(parent: int) -> None:
    """Kills this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before that was set
        os._exit(1)


class _Lane:
    """One of the sockets by which questions come, and the fork that serves it."""

    def __init__(self, fd: int, work: Work, *, nice: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._nice = nice
        self._work = work
        self._number = mmap.mmap(-1, _NUMBER_BYTES)  # of the question that the fork works on, which it shares; 0: none

    def fork(self) -> int:
        this = os.getpid()
        pid = os.fork()
        if not pid:
            self._serve(this)
        return pid

    def report_death(self, status: int) -> None:
        """Reports what ended the fork, unless it exited normally. The fork may have taken a question and died before it
        noted the number."""
        if status:
            died = os.WIFSIGNALED(status)
            self._answer({"signal": os.WTERMSIG(status)} if died else {"untried": "the work did not begin"})

    def _serve(self, parent: int) -> NoReturn:
        try:
            end_with(parent)
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # a core file would show the question
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # and so would a library's last words
            for bound in (signal.SIGPROF, signal.SIGALRM):
                signal.signal(bound, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF, signal.SIGALRM))
            os.nice(self._nice)
            data_bytes = _data_bytes()
            for _ in range(_QUESTIONS_OF_A_FORK):
                self._serve_one(data_bytes)
            os._exit(0)
        finally:  # the fork must never go on as its parent
            os._exit(1)

    def _serve_one(self, data_bytes: int | None) -> None:
        message, fds, _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES_MAX, 1)
        if not message:
            os._exit(_LANE_CLOSED)
        question = json.loads(message)
        self._note(question["number"])
        if data_bytes is not None:
            resource.setrlimit(
                resource.RLIMIT_DATA,
                (data_bytes + question["memory_bytes"], resource.getrlimit(resource.RLIMIT_DATA)[1]),
            )
        with open(fds[0], "r+b") as file:
            signal.alarm(question["time_s"])
            signal.setitimer(signal.ITIMER_PROF, question["cpu_s"])
            answer, content = _answer_of(self._work, question, file.read())
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
            file.seek(0)
            file.write(content)
        self._answer(answer)

    def _note(self, number: int) -> None:
        self._number[:] = number.to_bytes(_NUMBER_BYTES, "little")

    def _answer(self, answer: Answer) -> None:
        number = int.from_bytes(self._number[:], "little")
        self._note(0)
        self._socket.send(json.dumps({"number": number, **answer}).encode())


def _answer_of(work: Work, question: Mapping[str, Any], content: bytes) -> tuple[Answer, bytes]:
    try:
        made = work(question, content)
    except InvalidRequest as error:
        return {"refused": _fields(error)}, b""
    except BatonError as error:
        return {"failed": _fields(error)}, b""
    except MemoryError:
        return {"signal": signal.SIGABRT}, b""
    except BaseException as error:  # noqa: BLE001  such as a panic of a library, which is no Exception
        place = traceback.extract_tb(error.__traceback__)[-1]
        # Without its text, which may be the question's.
        what = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
        return {"failed": _fields(InternalError(f"it failed inside: {what}"))}, b""
    return {"bytes": len(made)}, made


def _fields(error: BatonError) -> Answer:
    """The arguments that make the same error."""
    return {
        "message": error.message,
        "field": error.field,
        "value": error.value,
        "allowed": error.allowed,
        "cure": error.cure,
    }


def _at_most(hard: int, bound: int) -> int:
    return bound if hard == resource.RLIM_INFINITY else min(hard, bound)


def _data_bytes() -> int | None:
    """Memory of this process that RLIMIT_DATA counts. Returns None if the kernel does not report it; then nothing is
    limited."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/self/statm").read_text().split()[5]) * mmap.PAGESIZE
    return None
