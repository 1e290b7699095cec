"""`python -m node.ranks.worker`: a rank above 0. Follows rank 0's steps on one thread and serves its KV transfer on an
event loop; ends with rank 0, however that ends.

Only rank 0 or its host's process starts it, with the numbers of two inherited sockets, one for calls and one for steps,
its own process id, and the directory of the model on this host.
"""

import asyncio
import logging
import signal
import socket
import sys
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from baton.errors import ConfigError
from baton.logs import set_up_logging
from engine.build import Built
from engine.device.out_of_memory import describe_out_of_memory
from node.assembly import load, open_transfer
from node.ranks.join import join, leave
from node.ranks.messages import Setup, Up
from node.ranks.parent import end_with, exit_at_once
from node.ranks.serving import TransferServer
from node.ranks.steps import follow

log = logging.getLogger("baton")

# Rank 0 most likely finds the same fault. It gets this long to log it and end this process, so it is logged once.
_LEADER_FIRST_S = 1.0


def main() -> None:
    calls, steps = socket.socket(fileno=int(sys.argv[1])), Connection(int(sys.argv[2]))
    # A terminal's Ctrl-C and a group's SIGTERM reach every process: rank 0 drains, and then ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with(int(sys.argv[3]))
    try:
        setup = receive_setup(steps)
    except EOFError:
        exit_at_once(1)
    settings = setup.settings.model_copy(update={"model": Path(sys.argv[4])})
    level = settings.log_level
    # Rank 0 logs what all ranks do.
    set_up_logging(
        "warning" if level == "info" else level,
        role=setup.program,
        name=f"{settings.name or ''} rank {setup.rank}".strip(),
        form=settings.log_format,
    )
    try:
        parallel = join(setup.rank, settings, meeting=setup.meeting)
        built = load(settings, parallel=parallel)
        thread = threading.Thread(target=_follow, args=(steps, built), name="device", daemon=True)
        thread.start()
        asyncio.run(TransferServer(setup.rank, partial(open_transfer, settings, built)).serve(calls))
    except ConfigError as error:
        time.sleep(_LEADER_FIRST_S)
        log.error("%s", error)
        exit_at_once(2)
    except EOFError:
        exit_at_once(1)
    except Exception as error:
        if (line := describe_out_of_memory(error)) is None:
            log.exception("rank %d failed", setup.rank)
        else:
            time.sleep(_LEADER_FIRST_S)
            log.error("%s", line)
        exit_at_once(1)
    thread.join()
    leave()
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


def _follow(steps: Connection, built: Built) -> None:
    try:
        follow(steps, built.runner)
    except Exception as error:
        if (line := describe_out_of_memory(error)) is None:
            log.exception("an engine step failed")
        else:
            log.error("an engine step failed: %s", line)
        exit_at_once(1)


if __name__ == "__main__":
    main()
