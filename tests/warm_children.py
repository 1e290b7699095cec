"""Child processes of a node that were forked before the node started.

Importing torch takes each rank 3 s of CPU, and loading UCX takes the process that tries addresses 0.25 s. Spare
processes are children of the node, as those are, and hold no thread and no connection of it. One becomes such a child
when the node starts it: it gets the command, the environment and the sockets, and runs the same module.
"""

import atexit
import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

import psutil

_NAME, _PR_SET_NAME = "warm-rank", 15
_TRIAL = "kvtransfer.transports.ucx_trial"
_MESSAGE_BYTES_MAX = 1 << 17
_FIRST_OWN, _ABOVE = 3, 512  # descriptors after stderr; numbers above those of any inherited socket


def keep_children_warm(ranks: int) -> None:
    """Forks processes for the first child processes of a node that this process, still without threads, will run.

    Args:
        ranks: ranks of the node but this one.
    """
    from baton.node.ranks import group
    from baton.settings.environment import child_environment

    cold, spares = group._spawn, [_fork_spare() for _ in range(ranks)]

    def spawn(command: list[str], descriptors: tuple[int, ...]) -> subprocess.Popen[bytes]:
        if not spares:
            return cold(command, descriptors)
        return _WarmChild(spares.pop(0), command, descriptors, child_environment())

    group._spawn = spawn
    _keep_trial_warm()


def _keep_trial_warm() -> None:
    """Forks the first process that will try addresses of UCX workers for this process."""
    from baton.settings.environment import child_environment
    from kvtransfer.transports import ucx_probe

    cold, spares = ucx_probe._spawn, [_fork_spare()]

    def spawn(command: list[str], descriptor: int) -> subprocess.Popen[bytes]:
        if not spares:
            return cold(command, descriptor)
        return _WarmChild(spares.pop(), command, (descriptor,), child_environment(**ucx_probe._VARIABLES))

    ucx_probe._spawn = spawn


def ranks_of(node: int) -> list[int]:
    """The processes of a node's ranks above 0, warm or not."""
    children = psutil.Process(node).children()
    return [each.pid for each in children if each.name() == _NAME or "baton.node.ranks.worker" in each.cmdline()]


class _WarmChild(subprocess.Popen[bytes]):
    """A spare process that runs `python -P -m module ...`."""

    def __init__(
        self,
        spare: tuple[int, socket.socket],
        command: list[str],
        descriptors: tuple[int, ...],
        environment: dict[str, str],
    ) -> None:
        self._spare, self._environment = spare, environment
        super().__init__(command, pass_fds=descriptors)

    def _execute_child(
        self, args: Sequence[str], executable: Any, before: Any, close: Any, descriptors: tuple[int, ...], *_: Any
    ) -> None:
        """Called by `Popen` to start the process."""
        self.pid, link = self._spare
        self._child_created = True
        with link:
            message = json.dumps([args[3:], self._environment, descriptors]).encode()
            socket.send_fds(link, [message], descriptors)


def _fork_spare() -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become(theirs)
    theirs.close()
    return pid, ours


def _become(link: socket.socket) -> NoReturn:
    """Waits for a command, and ends as an interpreter does: threads first, then exit handlers."""
    code: object = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):  # they are for the node
            signal.signal(number, signal.SIG_IGN)
        message, descriptors, _, _ = socket.recv_fds(link, _MESSAGE_BYTES_MAX, 16)
        if not message:  # the node has ended
            os._exit(0)
        arguments, environment, numbers = json.loads(message)
        link.detach()
        _place(descriptors, numbers)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = arguments
        if arguments[0] == _TRIAL:
            _set_ucx_options(environment)
        else:
            ctypes.CDLL(None).prctl(_PR_SET_NAME, _NAME.encode(), 0, 0, 0)
            _keep_trial_warm()
        import_module(arguments[0]).main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001  as an interpreter ends
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code if isinstance(code, int) else 1)


def _set_ucx_options(environment: Mapping[str, str]) -> None:
    """Sets what UCX has read from the environment of the fork server when it was loaded there."""
    set_option = ctypes.CDLL("libucs.so.0").ucs_global_opts_set_value
    for name in ("LOG_LEVEL", "HANDLE_ERRORS", "WARN_UNUSED_ENV_VARS", "MODULES"):
        if (value := environment.get(f"UCX_{name}")) is not None:
            assert set_option(name.encode(), value.encode()) == 0, name


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives descriptors their numbers, and closes all others but those of outputs."""
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _ABOVE) for descriptor in descriptors]
    os.closerange(_FIRST_OWN, _ABOVE)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for descriptor, number in zip(above, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
