"""`python -m baton.gateway.process.worker`: one of several processes that serve one gateway's ports. Only its parent
starts it.

A worker never outlives its parent: it would keep the ports from the next gateway.
"""

import asyncio
import ctypes
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict

import uvloop

from baton.core.errors import ConfigError
from baton.core.logs import set_up_logging
from baton.gateway.core.shared_counters import SharedCounters
from baton.gateway.observe.recent import Shown
from baton.gateway.process import process
from baton.gateway.process.worker_channel import Message, WorkerChannel
from baton.gateway.serving.serving import Serving
from baton.gateway.text.model import read_served_model
from baton.settings.gateway_config import GatewaySettings
from baton.settings.reader import fail

log = logging.getLogger("baton")

_PR_SET_PDEATHSIG = 1


def main(line_fd: int, board_fd: int, row: int) -> None:
    """Serves until SIGTERM, or until the parent ends.

    Args:
        line_fd: of the socket to the parent, which first sends the settings.
        board_fd: of the memory that all workers share.
        row: the own one of the shared counters.
    """
    # A parent that ended before this line has closed the socket, which `follow` notices.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    end = socket.socket(fileno=line_fd)
    with end.dup().makefile("rb", buffering=0) as first:
        line = first.readline()
    if not line:
        return
    settings = GatewaySettings(**json.loads(line))
    program = f"gateway/{row}"
    set_up_logging(settings.log_level, role=program, name=settings.name or "", form=settings.log_format)
    try:
        uvloop.run(_run(settings, end, SharedCounters(settings.workers, row, board_fd)))
    except ConfigError as error:
        fail(program, error)
    except KeyboardInterrupt:
        log.info("interrupted")


async def _run(settings: GatewaySettings, end: socket.socket, counters: SharedCounters) -> None:
    model = read_served_model(
        settings.model,
        settings.model_name,
        settings.chat_template,
        max_context_tokens=settings.max_context_tokens,
        special_in_texts=settings.user_special_tokens == "allow",
    )
    other_workers = _OtherWorkers(end, counters)
    following = asyncio.create_task(other_workers.follow(), name="other_workers")
    await process.run(settings, model, None, other_workers.ready, other_workers=other_workers)
    following.cancel()


class _OtherWorkers:
    """The other workers, through the parent."""

    def __init__(self, end: socket.socket, counters: SharedCounters) -> None:
        self.shared_counters = counters
        self._line = WorkerChannel(end, self._answer)
        self._serving: Serving | None = None
        self._tasks: set[asyncio.Task[object]] = set()

    async def follow(self) -> None:
        await self._line.run()
        log.error("the parent of this worker has ended: ending")
        logging.shutdown()
        os._exit(1)

    def join(self, serving: Serving) -> None:
        self._serving = serving

    def ready(self, found: process.Addresses) -> None:
        task = asyncio.create_task(self._line.ask({"ready": asdict(found)}))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def abort(self, request_ids: Sequence[str], client: str | None) -> set[str]:
        answers = await self._ask_others({"abort": list(request_ids), "client": client})
        return {each for answer in answers for each in answer["aborted"]}

    async def recent(self, most: int, client: str | None) -> list[list[Shown]]:
        return [answer["recent"] for answer in await self._ask_others({"recent": most, "client": client})]

    async def _ask_others(self, question: Message) -> list[Message]:
        answer = await self._line.ask(question)
        return answer["answers"] if answer else []

    async def _answer(self, question: Message) -> Message:
        serving, client = self._serving, question["client"]
        if "recent" in question:
            return {"recent": [] if serving is None else serving.recent.newest(question["recent"], client)}
        return {"aborted": [] if serving is None else list(serving.abort_here(question["abort"], client))}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
