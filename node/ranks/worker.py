"""`python -m node.ranks.worker`: a rank above 0. Follows rank 0's steps on one thread, and serves its KV transfer on an
event loop; ends with rank 0, however that ends.

Only rank 0 starts it, with the numbers of two open sockets: one for calls, one for steps.
"""

import asyncio
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from baton.errors import BatonError, ConfigError, InternalError
from baton.rpc.server import set_up_logging
from engine.build import Built
from kvtransfer.node import KVTransfer
from node.assembly import load, open_transfer
from node.ranks.channel import AsyncChannel, Channel
from node.ranks.join import join, leave
from node.ranks.messages import Answer, Beat, Call, Cancel, Close, Setup, Start
from node.ranks.steps import StepReader, follow

log = logging.getLogger("baton")

_PR_SET_PDEATHSIG = 1
_BEAT_S = 1.0
_STUCK_AFTER_S = 4.0
# What rank 0 may ask of a KVTransfer.
_METHODS = frozenset(
    {
        "listen",
        "connect",
        "disconnect",
        "warm_up",
        "warmed_up",
        "use_link",
        "send",
        "quiet",
        "open_lease",
        "close_lease",
    }
)


def main() -> None:
    calls, steps = (Channel.inherited(int(descriptor)) for descriptor in sys.argv[1:])
    # A terminal's Ctrl-C and a group's SIGTERM reach every process: rank 0 drains, and then ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setup: Setup = calls.receive()
    _end_with(setup.leader)
    set_up_logging(setup.settings.log_level, f"{setup.program} rank {setup.rank}")
    size = setup.settings.tensor_parallel_size
    try:
        parallel = join(setup.rank, size, store=setup.store, device=setup.settings.device)
        built = load(setup.settings, parallel=parallel)
        thread = threading.Thread(target=_follow, args=(StepReader(steps), built), name="device", daemon=True)
        thread.start()
        asyncio.run(_Server(setup, built).serve(calls))
    except ConfigError as error:
        log.error("%s", error)
        _exit(2)
    except EOFError:
        _exit(1)
    except Exception:
        log.exception("rank %d failed", setup.rank)
        _exit(1)
    thread.join()
    leave()
    _exit(0)


def _end_with(leader: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != leader:  # it ended before that was set
        _exit(1)


def _exit(code: int) -> None:
    """At once: other threads may wait for a GPU that waits for a rank that is gone."""
    logging.shutdown()
    os._exit(code)


def _follow(reader: StepReader, built: Built) -> None:
    try:
        follow(reader, built.runner)
    except Exception:
        log.exception("an engine step failed")
        _exit(1)


class _Server:
    """Does what rank 0 asks of the transfer, and tells it what happens there."""

    def __init__(self, setup: Setup, built: Built) -> None:
        self._setup = setup
        self._built = built
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, calls: Channel) -> None:
        """Returns when it is told to close.

        Raises:
            EOFError: rank 0 is gone.
        """
        channel = await AsyncChannel.over(calls)
        start: Start = await channel.receive()
        transfer = open_transfer(
            self._setup.settings,
            self._built,
            incarnation=start.incarnation,
            on_filled=channel.send,
            on_refused=channel.send,
        )
        async with transfer:
            channel.send(Answer(start.number))
            beat = asyncio.create_task(self._beat(channel, transfer), name="beat")
            while not isinstance(order := await channel.receive(), Close):
                self._take(order, channel, transfer)
            beat.cancel()
        await channel.close()

    def _take(self, order: Call | Cancel, channel: AsyncChannel, transfer: KVTransfer) -> None:
        number = order.number
        if isinstance(order, Call):
            task = asyncio.create_task(self._answer(order, channel, transfer), name=f"call-{order.method}")
            self._tasks[number] = task
            task.add_done_callback(lambda _: self._tasks.pop(number, None))
        elif task_or_none := self._tasks.get(number):
            task_or_none.cancel()

    async def _answer(self, call: Call, channel: AsyncChannel, transfer: KVTransfer) -> None:
        assert call.method in _METHODS, call.method
        method: Callable[..., Any] = getattr(transfer, call.method)
        try:
            channel.send(Answer(call.number, await method(*call.arguments, **call.named)))
        except BatonError as error:
            channel.send(Answer(call.number, error=error))
        except Exception as error:
            log.exception("a call of %s failed", call.method)
            told = InternalError(f"{type(error).__name__} on rank {self._setup.rank}", cure="see the node's log")
            channel.send(Answer(call.number, error=told))

    async def _beat(self, channel: AsyncChannel, transfer: KVTransfer) -> None:
        while True:
            channel.send(Beat(transfer.counters(), transfer.stuck(after_s=_STUCK_AFTER_S)))
            await asyncio.sleep(_BEAT_S)


if __name__ == "__main__":
    main()
