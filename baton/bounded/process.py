"""The gateway's end of a bounded process: starts it, sends it questions, replaces it."""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any, TypeVar

from baton.bounded.lanes import Answer
from baton.settings.environment import bare_environment

log = logging.getLogger("baton")

T = TypeVar("T")

_ANSWER_BYTES_MAX = 1 << 18
# How late an answer may be, although the process itself ends work that takes longer than its bound.
_ANSWER_LATE_S = 30.0
_RESTART_S = 1.0
_SMALL_BYTES = 1 << 20

# The signals that end work because of its question: the bound of CPU time, and errors of a library, such as a lack of
# memory.
FAULTS = (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True)
class Bound:
    """Bounds of the work on one question.

    Attributes:
        cpu_s: CPU time.
        memory_bytes: memory beyond that of the process without the work.
        time_s: wall time, for work that waits for something; on a busy machine work within its CPU time may take long,
            too.
    """

    cpu_s: float
    memory_bytes: int
    time_s: int = 120


class BoundedProcess:
    """A child process that works on questions within bounds. Used on one event loop; each lane has one question
    at a time.

    The process inherits no descriptor and no variable that it does not need: no socket, no key.

    Args:
        module: calls `baton.bounded.lanes.serve`.
        task: what the process does, for messages: "check grammars".
        facts: facts that all questions share; a value of JSON.
    """

    def __init__(self, module: str, task: str, facts: Mapping[str, object], *, lanes: int) -> None:
        self._module, self._task, self._facts = module, task, facts
        self._num_lanes = lanes
        self._popen: subprocess.Popen[bytes] | None = None
        self._lanes: list[socket.socket] = []
        self._asking: set[socket.socket] = set()
        self._answered = False  # this process, at least once
        self._next_start_s = 0.0
        self._closed = False
        self._number = 0  # of the last question

    @property
    def pid(self) -> int | None:
        """The process's pid. Returns None if there is none now."""
        return None if self._popen is None else self._popen.pid

    async def ask(
        self, lane: int, question: Mapping[str, object], content: bytes, bound: Bound
    ) -> tuple[Answer, bytes]:
        """Asks a question. Returns how the work on it ended, and the content of its answer.

        The answer is `bytes` with the content's size, `refused` or `failed` with an error's fields, the `signal` that
        ended the work, or why it is `untried`. Work that neither its bounds nor a library's error ended is tried once
        more.
        """
        answer, made = await self._try(lane, question, content, bound)
        if "untried" in answer or answer.get("signal", signal.SIGALRM) not in (*FAULTS, signal.SIGALRM):
            answer, made = await self._try(lane, question, content, bound)
        return answer, made

    async def _try(
        self, lane: int, question: Mapping[str, object], content: bytes, bound: Bound
    ) -> tuple[Answer, bytes]:
        try:
            if self._popen is None or self._popen.poll() is not None:
                self._end()
                self._start()
            end = self._lanes[lane]
            self._asking.add(end)
            try:
                return await self._ask(end, question, content, bound)
            finally:
                self._asking.discard(end)
                if end not in self._lanes:
                    end.close()
        except OSError as error:
            return {"untried": str(error) or type(error).__name__}, b""

    async def _ask(
        self, end: socket.socket, question: Mapping[str, object], content: bytes, bound: Bound
    ) -> tuple[Answer, bytes]:
        self._number += 1
        try:
            answer = await self._exchange(end, {**question, "number": self._number, **asdict(bound)}, content)
        except (OSError, asyncio.CancelledError):  # its answer would be taken for the next question's
            if end in self._lanes:
                self._end()
            raise
        self._answered = True
        return answer

    def close(self) -> None:
        """Ends the process for good. Questions that wait stay untried."""
        self._closed = True
        self._end()

    async def _exchange(self, end: socket.socket, question: Mapping[str, Any], content: bytes) -> tuple[Answer, bytes]:
        file = os.memfd_create("question")
        try:
            await _with_file(file, len(content), lambda fd: os.pwrite(fd, content, 0))
            socket.send_fds(end, [json.dumps(question).encode()], [file])
            async with asyncio.timeout(question["time_s"] + _ANSWER_LATE_S):
                message = await asyncio.get_running_loop().sock_recv(end, _ANSWER_BYTES_MAX)
            if not message:
                raise ConnectionResetError(f"the process that was to {self._task} has ended")
            answer: Answer = json.loads(message)
            if answer.pop("number") != question["number"]:  # a fork was killed, perhaps with the question
                raise ConnectionResetError(f"the process that was to {self._task} was killed")
            size_bytes = answer.get("bytes", 0)
            return answer, await _with_file(file, size_bytes, lambda fd: os.pread(fd, size_bytes, 0))
        finally:
            os.close(file)

    def _start(self) -> None:
        if self._closed:
            raise ConnectionAbortedError("the gateway ends")
        if monotonic() < self._next_start_s:
            raise ConnectionRefusedError(f"the process that is to {self._task} does not start")
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(self._num_lanes)]
        theirs = [pair[1] for pair in pairs]
        self._lanes = [pair[0] for pair in pairs]
        for end in self._lanes:
            end.setblocking(False)
        facts = os.memfd_create("facts")  # a command line would show them, and has a maximum size
        os.pwrite(facts, json.dumps(self._facts).encode(), 0)
        fds = [facts, *(end.fileno() for end in theirs)]
        self._answered = False
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, str(os.getpid()), *map(str, fds)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=fds,
                env=bare_environment(OPENBLAS_NUM_THREADS="1"),  # it forks
            )
        except OSError as error:
            self._end()
            self._next_start_s = monotonic() + _RESTART_S
            log.error("cannot start a process to %s: %s", self._task, error)
            raise
        finally:
            os.close(facts)
            for end in theirs:
                end.close()
        log.debug("started pid %d to %s", self._popen.pid, self._task)

    def _end(self) -> None:
        popen, self._popen = self._popen, None
        lanes, self._lanes = self._lanes, []
        if popen is not None:
            popen.kill()
            popen.wait()
            if not self._answered and not self._closed:
                log.error("pid %d, started to %s, ended before its first answer", popen.pid, self._task)
                self._next_start_s = monotonic() + _RESTART_S
        for end in lanes:
            if end not in self._asking:  # otherwise `ask` gets the end of the stream, and closes it
                end.close()


async def _with_file(file: int, size_bytes: int, work: Callable[[int], T]) -> T:
    """Runs `work` on the file's descriptor and returns its result; large copies run in a thread."""
    if size_bytes <= _SMALL_BYTES:
        return work(file)
    # NOTE: the thread has a descriptor of its own: after a cancellation, the number of ours may be another file's.
    own = os.dup(file)

    def copy() -> T:
        try:
            return work(own)
        finally:
            os.close(own)

    return await asyncio.to_thread(copy)
