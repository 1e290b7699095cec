"""The gateway's end of the process that checks grammars: starts it, asks it, replaces it."""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from time import monotonic
from typing import Any

from baton.environment import child_environment

log = logging.getLogger("baton")

_ANSWER_BYTES_MAX = 1 << 18
# The process itself ends a check that takes 120 s.
_ANSWER_TIMEOUT_S = 150.0
_RESTART_S = 1.0

Answer = dict[str, Any]


class TrialProcess:
    """Used on one event loop. Each lane has one question at a time.

    Args:
        facts: `grammar.trial.Facts`.
    """

    def __init__(self, facts: Mapping[str, object], *, lanes: int) -> None:
        self._facts = facts
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
        """None: there is none now."""
        return None if self._popen is None else self._popen.pid

    async def ask(self, lane: int, kind: str, text: bytes, *, cpu_s: float) -> Answer:
        """How the check of a grammar ended: `{}`, or `refused` or `failed` with an error's fields, or the `signal` that
        ended it. A process that has ended is replaced first.

        Raises:
            OSError: the process does not start, or it ended meanwhile.
        """
        if self._popen is None or self._popen.poll() is not None:
            self._end()
            self._start()
        end = self._lanes[lane]
        self._asking.add(end)
        try:
            self._number += 1
            answer = await self._exchange(end, {"number": self._number, "kind": kind, "cpu_s": cpu_s}, text)
            self._answered = True
            return answer
        except (OSError, asyncio.CancelledError):  # its answer would be taken for that to the next question
            if end in self._lanes:
                self._end()
            raise
        finally:
            self._asking.discard(end)
            if end not in self._lanes:
                end.close()

    def close(self) -> None:
        """Ends the process for good. Questions that wait raise OSError."""
        self._closed = True
        self._end()

    async def _exchange(self, end: socket.socket, question: Mapping[str, object], text: bytes) -> Answer:
        file = os.memfd_create("grammar")
        try:
            os.pwrite(file, text, 0)
            socket.send_fds(end, [json.dumps(question).encode()], [file])
        finally:
            os.close(file)
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            content = await asyncio.get_running_loop().sock_recv(end, _ANSWER_BYTES_MAX)
        if not content:
            raise ConnectionResetError("the process that checks grammars has ended")
        answer: Answer = json.loads(content)
        if answer.pop("number") != question["number"]:  # a fork was killed, perhaps with the question
            raise ConnectionResetError("the process that waited for grammars was killed")
        return answer

    def _start(self) -> None:
        if self._closed:
            raise ConnectionAbortedError("the gateway ends")
        if monotonic() < self._next_start_s:
            raise ConnectionRefusedError("the process that checks grammars does not start")
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(self._num_lanes)]
        theirs = [pair[1] for pair in pairs]
        self._lanes = [pair[0] for pair in pairs]
        for end in self._lanes:
            end.setblocking(False)
        fds = [end.fileno() for end in theirs]
        self._answered = False
        try:
            self._popen = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "grammar.trial",
                    str(os.getpid()),
                    json.dumps(self._facts),
                    *map(str, fds),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=fds,
                env=child_environment(OPENBLAS_NUM_THREADS="1"),  # it forks
            )
        except OSError as error:
            self._end()
            self._next_start_s = monotonic() + _RESTART_S
            log.error("no process starts that could check grammars: %s", error)
            raise
        finally:
            for end in theirs:
                end.close()
        log.debug("pid %d checks grammars", self._popen.pid)

    def _end(self) -> None:
        popen, self._popen = self._popen, None
        lanes, self._lanes = self._lanes, []
        if popen is not None:
            popen.kill()
            popen.wait()
            if not self._answered and not self._closed:
                log.error("pid %d was to check grammars, and ended before its first answer", popen.pid)
                self._next_start_s = monotonic() + _RESTART_S
        for end in lanes:
            if end not in self._asking:  # otherwise `ask` gets the end of the stream, and closes it
                end.close()
