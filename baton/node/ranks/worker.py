"""The process of a rank above 0. It ends with rank 0, however that ends.

One thread follows rank 0's steps, and an event loop serves the rank's KV transfer. Rank 0, or the process of the rank's
host, starts it through `baton.node.ranks.child`. The arguments are the numbers of two inherited sockets, for calls and
for steps, and the directory of the model on this host.
"""

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from baton.core.exits import END_S, exit_at_once
from baton.core.interpreter_lock import pass_lock_sooner
from baton.core.logs import set_up_logging
from baton.engine.build import BuiltRunner
from baton.node.early_host_memory import EarlyHostMemory
from baton.node.fault import Fault
from baton.node.from_settings import load, open_transfer
from baton.node.ranks.join import join, rank_device
from baton.node.ranks.messages import Setup, Up
from baton.node.ranks.serving import TransferServer
from baton.node.ranks.steps import follow

log = logging.getLogger("baton")


def main(arguments: Sequence[str]) -> None:
    for descriptor in map(int, arguments[:2]):
        os.set_inheritable(descriptor, False)
    pass_lock_sooner()
    calls, steps = socket.socket(fileno=int(arguments[0])), Connection(int(arguments[1]))
    try:
        setup = receive_setup(steps)
    except EOFError:
        exit_at_once(1)
    settings = setup.settings.model_copy(update={"model": Path(arguments[2])})
    level = settings.log_level
    # Rank 0 logs for all ranks.
    set_up_logging(
        "warning" if level == "info" else level,
        role=setup.program,
        name=f"{settings.name or ''} rank {setup.rank}".strip(),
        form=settings.log_format,
    )
    with _ending_at_errors(steps, setup):
        parallel = join(setup.rank, settings, meeting=setup.meeting)
        host_memory = EarlyHostMemory(settings, rank_device(settings, setup.rank))
        built = load(settings, parallel=parallel, host_memory=host_memory)
        thread = threading.Thread(target=_follow, args=(steps, setup, built), name="device", daemon=True)
        thread.start()
        make = partial(open_transfer, settings, built, host_pages=host_memory.pages)
        asyncio.run(TransferServer(setup.rank, make, guard=partial(_ending_at_errors, steps, setup)).serve(calls))
    thread.join()
    exit_at_once(0)


def receive_setup(steps: Connection) -> Setup:
    """Receives rank 0's first message, and answers that this rank is about to meet the others.

    Raises:
        EOFError: rank 0 is gone.
    """
    try:
        setup: Setup = steps.recv()
        steps.send(Up())
    except OSError:
        raise EOFError("rank 0 is gone") from None
    return setup


def _follow(steps: Connection, setup: Setup, built: BuiltRunner) -> None:
    try:
        follow(steps, built.runner)
    except Exception as error:  # noqa: BLE001  rank 0 logs it
        _end_with(Fault.of(error).within("an engine step failed"), steps, setup)


@contextmanager
def _ending_at_errors(steps: Connection, setup: Setup) -> Iterator[None]:
    """Ends this rank at an error of the block, before anything around the block closes, which may wait for others."""
    try:
        yield
    except EOFError:  # rank 0 is gone
        exit_at_once(1)
    except Exception as error:  # noqa: BLE001  rank 0 logs it
        _end_with(Fault.of(error), steps, setup)


def _end_with(fault: Fault, steps: Connection, setup: Setup) -> NoReturn:
    """Sends the fault to rank 0, which logs it and ends the node. A rank of another host also logs it there."""
    with suppress(OSError):
        steps.send(fault)
    if setup.rank >= setup.settings.ranks_per_host:
        fault.log(setup.program)
    else:
        # Rank 0 kills this process. Until then its connections stay open, so that no other rank reports them as broken.
        time.sleep(END_S)
    exit_at_once(fault.exit_code)
