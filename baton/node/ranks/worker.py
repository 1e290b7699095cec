"""The process of a rank above 0. Follows rank 0's steps on one thread and serves its KV transfer on an event loop; ends
with rank 0, however that ends.

Rank 0 or its host's process starts it through `baton.node.ranks.child`, with the numbers of two inherited sockets, one
for calls and one for steps, and the directory of the model on this host.
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
from baton.core.logs import set_up_logging
from baton.engine.build import BuiltRunner
from baton.node.assembly import load, open_transfer
from baton.node.fault import Fault
from baton.node.ranks.join import join
from baton.node.ranks.messages import Setup, Up
from baton.node.ranks.serving import TransferServer
from baton.node.ranks.steps import follow

log = logging.getLogger("baton")


def main(arguments: Sequence[str]) -> None:
    for descriptor in map(int, arguments[:2]):
        os.set_inheritable(descriptor, False)
    calls, steps = socket.socket(fileno=int(arguments[0])), Connection(int(arguments[1]))
    try:
        setup = receive_setup(steps)
    except EOFError:
        exit_at_once(1)
    settings = setup.settings.model_copy(update={"model": Path(arguments[2])})
    level = settings.log_level
    # Rank 0 logs what all ranks do.
    set_up_logging(
        "warning" if level == "info" else level,
        role=setup.program,
        name=f"{settings.name or ''} rank {setup.rank}".strip(),
        form=settings.log_format,
    )
    with _ending_at_errors(steps, setup):
        parallel = join(setup.rank, settings, meeting=setup.meeting)
        built = load(settings, parallel=parallel)
        thread = threading.Thread(target=_follow, args=(steps, setup, built), name="device", daemon=True)
        thread.start()
        make = partial(open_transfer, settings, built)
        asyncio.run(TransferServer(setup.rank, make, guard=partial(_ending_at_errors, steps, setup)).serve(calls))
    thread.join()
    exit_at_once(0)


def receive_setup(steps: Connection) -> Setup:
    """Rank 0's first message, answered: this rank is about to meet the others.

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
    """An error of the block ends this rank before anything around the block is closed, which may wait for others."""
    try:
        yield
    except EOFError:  # rank 0 is gone
        exit_at_once(1)
    except Exception as error:  # noqa: BLE001  rank 0 logs it
        _end_with(Fault.of(error), steps, setup)


def _end_with(fault: Fault, steps: Connection, setup: Setup) -> NoReturn:
    """Lets rank 0 log the fault and end the node. The log of another host is read on its own, so it is there too."""
    with suppress(OSError):
        steps.send(fault)
    if setup.rank >= setup.settings.ranks_per_host:
        fault.log(setup.program)
    else:
        # Rank 0 kills this process. Until then its connections stay, so that no rank's first fault is that they broke.
        time.sleep(END_S)
    exit_at_once(fault.exit_code)
