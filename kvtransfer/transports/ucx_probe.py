"""Tries a UCX worker's address in another process first, because a made-up address may end the process that uses it.

One process (`ucx_trial`) tries all addresses of a transfer. It starts at the first address and ends with this process.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

from baton.core.errors import BatonError, Overloaded, PeerRefused
from baton.settings.environment import child_environment
from kvtransfer.transports.ucx_address import worker_address
from kvtransfer.transports.ucx_trial import UNTRIED

log = logging.getLogger("baton")

_ANSWER_TIMEOUT_S = 30.0  # the process may have to start, and each trial has limits of its own
_NUMBER_BYTES = 8
# The trial's process reports nothing and dies of the signals that UCX handles. It starts no GPU, which takes seconds,
# because no address is dangerous to UCX's GPU transports.
_VARIABLES = {
    "UCX_LOG_LEVEL": "fatal",
    "UCX_HANDLE_ERRORS": "none",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_MODULES": "^cu*",
}


class UcxProbe:
    """Tries addresses, one at a time. Used on one event loop.

    A trial takes about 20 ms, and the first one 0.2 s more.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._number = 0
        self._popen: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Id of the process that tries addresses. Returns None if none runs."""
        return None if self._popen is None else self._popen.pid

    async def check(self, address: bytes) -> None:
        """Returns if UCX survives the address, which it may still refuse with an error.

        Raises:
            PeerRefused: it is not an address of a UCX worker, or UCX ends the process that uses it.
            Overloaded: it cannot be tried now.
        """
        content = worker_address(address)
        async with self._turn:
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    ended_by = await self._try(content)
            except (OSError, TimeoutError) as error:
                self._end()
                raise _untried(repr(error)) from None
        judge(ended_by, address)

    def close(self) -> None:
        """Ends the process. A check that is waiting raises Overloaded."""
        self._closed = True
        if self._turn.locked():
            self._kill()  # the waiting check reads the end of the stream, and closes the socket
        else:
            self._end()

    async def _try(self, content: bytes) -> int:
        """The trial's answer. A process that died while idle is replaced."""
        with suppress(OSError):
            if self._popen is not None and self._popen.poll() is None:
                return await self._ask(content)
        self._end()
        self._start()
        return await self._ask(content)

    def _kill(self) -> None:
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()
            self._popen = None

    def _end(self) -> None:
        self._kill()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _ask(self, content: bytes) -> int:
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        self._number += 1
        number = self._number.to_bytes(_NUMBER_BYTES, "little")
        await loop.sock_sendall(self._socket, number + content)
        while answer := await loop.sock_recv(self._socket, _NUMBER_BYTES + 1):
            if answer[:_NUMBER_BYTES] == number:  # not the answer to a check that was cancelled
                return answer[-1]
        raise ConnectionResetError("the process that tries addresses has ended")

    def _start(self) -> None:
        if self._closed:
            raise ConnectionAbortedError("the transfer is closed")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        with theirs:
            command = [sys.executable, "-P", "-m", "kvtransfer.transports.ucx_trial"]
            self._popen = _spawn([*command, str(theirs.fileno()), str(os.getpid())], theirs.fileno())
        log.debug("process %d tries the addresses of peers", self._popen.pid)


def judge(ended_by: int, address: bytes) -> None:
    """Raises the error for the outcome of an address's trial, as `UcxProbe.check` does.

    Args:
        ended_by: 0, a signal, or `UNTRIED`.
    """
    if ended_by == UNTRIED:
        raise _untried("UCX does not start there")
    if ended_by == signal.SIGALRM:  # a busy or suspended machine; one that computes for ever ends by its CPU time
        raise _untried("the trial took too long")
    if ended_by:
        name = signal.Signals(ended_by).name
        raise PeerRefused(
            f"UCX crashes on the peer's address ({name})",
            field="address",
            value=address[:40],
            cure="use the same package version on both nodes",
        )


def _spawn(command: list[str], descriptor: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(descriptor,),
        env=child_environment(**_VARIABLES),
    )


def _untried(why: str) -> BatonError:
    return Overloaded(f"the peer's address cannot be tried: {why}", retry_after_s=1.0)
