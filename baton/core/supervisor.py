"""The connection from a process to the `baton up` that started it. It carries reports, and when
it ends, the process ends too.

It is a Unix socket in the abstract namespace, which the kernel closes and removes, however `baton up` ends.
"""

import json
import logging
import os
import signal
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass

from baton.core.errors import ConfigError
from baton.core.exits import exit_within

log = logging.getLogger("baton")

# A process whose supervisor is gone ends without cleanup after this time.
_END_S = 2.0


@dataclass(frozen=True)
class Stage:
    """A stage of a process's work.

    Args:
        done, total: progress of the stage; both 0 if it is not measured.
    """

    name: str
    done: int = 0
    total: int = 0


class Supervisor:
    """Reports what this process is doing. Without a supervisor, it only keeps the last report.

    Args:
        name: name of the supervisor's socket; None: there is no supervisor.

    Attributes:
        stage: the last report.

    Raises:
        ConfigError: no supervisor listens there; it has ended, most likely.
    """

    def __init__(self, name: str | None) -> None:
        self.stage = Stage("starting")
        self._socket: socket.socket | None = None
        if name is None:
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.connect(f"\0{name}")
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"--supervisor is {name!r}, where nothing listens: {error.strerror}",
                field="supervisor",
                value=name,
                cure="leave it to `baton up`",
            ) from None
        threading.Thread(target=self._end_with_it, args=(self._socket,), name="supervisor", daemon=True).start()

    @property
    def present(self) -> bool:
        return self._socket is not None

    def report(self, stage: str, *, done: int = 0, total: int = 0, **more: object) -> None:
        """Sends what this process is doing. A report is dropped if the socket is full; any thread may call this.

        Args:
            done, total: progress of the stage.
            more: `address` as soon as the server's port is bound.
        """
        self.stage = Stage(stage, done, total)
        if total:
            more |= {"done": done, "total": total}
        if self._socket is not None:
            with suppress(OSError):
                self._socket.send(json.dumps({"stage": stage, **more}).encode(), socket.MSG_DONTWAIT)

    def failed(self, error: str) -> bool:
        """Sends why this process cannot start or go on. Returns whether the supervisor shows it, so that this process
        need not."""
        if self._socket is None:
            return False
        try:
            self._socket.send(json.dumps({"stage": "failed", "error": error}).encode(), socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    @staticmethod
    def _end_with_it(connection: socket.socket) -> None:
        with suppress(OSError):
            while connection.recv(1):
                pass
        exit_within(_END_S)
        os.kill(os.getpid(), signal.SIGTERM)
        log.warning("the process that started this one has ended: ending")
