"""One of several processes that share one gateway's ports: `python -m baton.gateway.process.worker`.

Only the parent process starts it. A worker never outlives its parent, else it would keep the ports from the next
gateway.
"""

import asyncio
import ctypes
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import uvloop

from baton.core.errors import ConfigError
from baton.core.logs import set_up_logging
from baton.gateway.core.shared_counters import SharedCounters
from baton.gateway.core.shared_sends import SharedSends
from baton.gateway.core.shared_sessions import SharedSessions
from baton.gateway.observe.recent import Shown
from baton.gateway.process import process
from baton.gateway.process.worker_channel import ANSWER_S, Message, WorkerChannel
from baton.gateway.serving.other_workers import AnswerAbout, AskedWorker
from baton.gateway.text.model import read_served_model
from baton.security.limit_table import LimitTable
from baton.settings.gateway_config import GatewaySettings
from baton.settings.reader import fail

log = logging.getLogger("baton")

_PR_SET_PDEATHSIG = 1
_RECENT_S = 2.0  # a page that shows requests waits no longer for those of other workers
_RELAY_S = 5.0


def main(channel_fd: int, counters_fd: int, limits_fd: int, sends_fd: int, sessions_fd: int, row: int) -> None:
    """Serves until SIGTERM, or until the parent ends.

    Args:
        channel_fd: descriptor of the socket to the parent, which sends the settings first.
        counters_fd: descriptor of the shared counters' memory.
        limits_fd: descriptor of the memory with what clients have used of their limits.
        sends_fd: descriptor of the memory with what was sent to each node.
        sessions_fd: descriptor of the memory with the nodes of each session.
        row: index of this worker's row in the other memories.
    """
    # If the parent ended before this call, `follow` notices the closed socket.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    end = socket.socket(fileno=channel_fd)
    with end.dup().makefile("rb", buffering=0) as first:
        line = first.readline()
    if not line:
        return
    settings = GatewaySettings(**json.loads(line))
    program = f"gateway/{row}"
    set_up_logging(settings.log_level, role=program, name=settings.name or "", form=settings.log_format)
    try:
        rows = settings.processes
        limits, sends = LimitTable(rows, row, limits_fd), SharedSends(rows, row, sends_fd)
        shared = process.SharedMemory(limits, sends, SharedSessions(sessions_fd))
        uvloop.run(_run(settings, end, SharedCounters(rows, row, counters_fd), shared))
    except ConfigError as error:
        fail(program, error)
    except KeyboardInterrupt:
        log.info("interrupted")


async def _run(
    settings: GatewaySettings, end: socket.socket, counters: SharedCounters, shared: process.SharedMemory
) -> None:
    model = read_served_model(
        settings.model,
        settings.model_name,
        settings.chat_template,
        max_context_tokens=settings.max_context_tokens,
        special_in_texts=settings.user_special_tokens == "allow",
    )
    other_workers = _OtherWorkers(end, counters)
    following = asyncio.create_task(other_workers.follow(), name="other_workers")
    await process.run(settings, model, None, other_workers.ready, other_workers=other_workers, shared=shared)
    following.cancel()


class _OtherWorkers:
    """Reaches the other workers through the parent."""

    def __init__(self, end: socket.socket, counters: SharedCounters) -> None:
        self.shared_counters = counters
        self._channel = WorkerChannel(end, self._answer)
        self._serving: AskedWorker | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        self._topics: dict[str, AnswerAbout] = {}

    async def follow(self) -> None:
        await self._channel.run()
        log.error("the parent process has ended, so this worker exits")
        logging.shutdown()
        os._exit(1)

    def join(self, serving: AskedWorker) -> None:
        self._serving = serving

    def ready(self, found: process.Addresses) -> None:
        task = asyncio.create_task(self._channel.ask({"ready": asdict(found)}))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def abort(self, request_ids: Sequence[str], client: str | None) -> set[str]:
        answers = await self._broadcast({"abort": list(request_ids), "client": client})
        return {each for answer in answers for each in answer["aborted"]}

    async def recent(self, most: int, client: str | None) -> list[list[Shown]]:
        question = {"recent": most, "client": client}
        return [answer["recent"] for answer in await self._broadcast(question, within_s=_RECENT_S)]

    def answer_about(self, topic: str, answer: AnswerAbout) -> None:
        self._topics[topic] = answer

    async def ask_about(self, topic: str, question: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [answer["about"] for answer in await self._broadcast({"topic": topic, "question": dict(question)})]

    async def _broadcast(self, question: Message, *, within_s: float = ANSWER_S) -> list[Message]:
        """Sends a question to all other workers; returns the answers that came in time."""
        # The parent gives up first, and then sends the answers that it has.
        answer = await self._channel.ask({**question, "within_s": within_s}, within_s=within_s + _RELAY_S)
        return answer["answers"] if answer else []

    async def _answer(self, question: Message) -> Message:
        if "topic" in question:
            answer = self._topics.get(question["topic"])
            return {"about": {} if answer is None else answer(question["question"], self.shared_counters.row)}
        serving, client = self._serving, question["client"]
        if "recent" in question:
            return {"recent": [] if serving is None else serving.recent.newest(question["recent"], client)}
        return {"aborted": [] if serving is None else list(serving.abort_here(question["abort"], client))}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
