"""The process that checks grammars, each in a fork that a bound of CPU time, memory or time may end.

`grammar.trial_process` starts it. It reads the tokenizer once. A fork waits at the end of each lane, checks one grammar
after another, and is replaced when it ends. Messages of a lane are JSON objects; a grammar's text comes as a memory
file, because a message has a maximum size.
"""

import ctypes
import gc
import json
import mmap
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from baton.errors import BatonError, InternalError, InvalidRequest
from baton.types import Grammar, GrammarKind
from grammar.compiler import GrammarCompiler
from grammar.refusal import refusal

_MESSAGE_BYTES_MAX = 4096
# A fork is replaced after that many, so that what the library keeps of them stays small.
_GRAMMARS_OF_A_FORK = 200
# A bound for a grammar that waits for something; on a busy machine a check within its CPU time may take long, too.
_TIME_S = 120
_NUMBER_BYTES = 8
_LANE_CLOSED = 3
_NICE = 10  # for each lane after the first, whose grammars take long
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4


@dataclass(frozen=True)
class Facts:
    """What all checks share.

    Attributes:
        memory_bytes: what checks may add to the memory of this process.
    """

    tokenizer: str
    vocab_size: int
    eos_token_ids: Sequence[int]
    memory_bytes: int


def main(parent: int, facts: Facts, lane_fds: Sequence[int]) -> None:
    """Serves until the other end of a lane is closed, or the parent ends."""
    end_with(parent)
    for of_terminal in (signal.SIGINT, signal.SIGTERM):
        signal.signal(of_terminal, signal.SIG_IGN)
    compiler = GrammarCompiler(Path(facts.tokenizer), facts.vocab_size, facts.eos_token_ids)
    with suppress(BatonError):  # each check will say it
        compiler.load()
    gc.collect()
    gc.freeze()  # forks then share the memory
    lanes = [_Lane(fd, compiler, facts.memory_bytes, nice=_NICE * number) for number, fd in enumerate(lane_fds)]
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
    """One of the sockets by which grammars come, and the fork that serves it."""

    def __init__(self, fd: int, compiler: GrammarCompiler, memory_bytes: int, *, nice: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._nice = nice
        self._compiler = compiler
        self._memory_bytes = memory_bytes
        self._number = mmap.mmap(-1, _NUMBER_BYTES)  # of the question that the fork works on, which it shares; 0: none

    def fork(self) -> int:
        this = os.getpid()
        pid = os.fork()
        if not pid:
            self._serve(this)
        return pid

    def report_death(self, status: int) -> None:
        """Says what ended the fork, unless it was done. It may have taken a question with it of which it had not noted
        the number."""
        if status:
            died = os.WIFSIGNALED(status)
            self._answer({"signal": os.WTERMSIG(status)} if died else {"untried": "the check did not begin"})

    def _serve(self, parent: int) -> NoReturn:
        try:
            end_with(parent)
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # a core file would show the grammar
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # and so would the library's last words
            for bound in (signal.SIGPROF, signal.SIGALRM):
                signal.signal(bound, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF, signal.SIGALRM))
            _limit_memory(self._memory_bytes)
            os.nice(self._nice)
            for _ in range(_GRAMMARS_OF_A_FORK):
                self._serve_one()
            os._exit(0)
        finally:  # nothing of this fork may go on as its parent
            os._exit(1)

    def _serve_one(self) -> None:
        content, fds, _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES_MAX, 1)
        if not content:
            os._exit(_LANE_CLOSED)
        question = json.loads(content)
        self._note(question["number"])
        with open(fds[0], "rb") as file:
            text = file.read().decode(errors="surrogatepass")
        signal.alarm(_TIME_S)
        signal.setitimer(signal.ITIMER_PROF, question["cpu_s"])
        answer = self._check(Grammar(GrammarKind(question["kind"]), text))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        self._answer(answer)

    def _check(self, grammar: Grammar) -> dict[str, Any]:
        try:
            self._compiler.compile(grammar)
        except InvalidRequest as error:
            return {"refused": _fields(error)}
        except BatonError as error:
            return {"failed": _fields(error)}
        except MemoryError:
            return {"signal": signal.SIGABRT}
        except RecursionError:
            return {"refused": _fields(refusal("the grammar is too deeply nested"))}
        except BaseException as error:  # noqa: BLE001  such as a panic of the library, which is no Exception
            place = traceback.extract_tb(error.__traceback__)[-1]
            # Without its text, which may be the grammar's.
            what = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
            return {"failed": _fields(InternalError(f"the check of the grammar failed: {what}"))}
        return {}

    def _note(self, number: int) -> None:
        self._number[:] = number.to_bytes(_NUMBER_BYTES, "little")

    def _answer(self, answer: dict[str, Any]) -> None:
        number = int.from_bytes(self._number[:], "little")
        self._note(0)
        self._socket.send(json.dumps({"number": number, **answer}).encode())


def _fields(error: BatonError) -> dict[str, Any]:
    """The arguments that make the same error."""
    return {
        "message": error.message,
        "field": error.field,
        "value": error.value,
        "allowed": error.allowed,
        "cure": error.cure,
    }


def _limit_memory(more_bytes: int) -> None:
    """Lets this process take this much more. Where the kernel does not tell its size, nothing is limited."""
    with suppress(OSError, ValueError):
        data_pages = int(Path("/proc/self/statm").read_text().split()[5])
        limit = data_pages * mmap.PAGESIZE + more_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    main(int(sys.argv[1]), Facts(**json.loads(sys.argv[2])), [int(each) for each in sys.argv[3:]])
