"""Prepares conversations in another process, because nothing can interrupt a template within a process.

Each rendering runs in a fork of that process (`baton.gateway.text.chat.rendering`). If it takes too much, the fork ends
and the request is refused. Every rendering first gets a moment of CPU time. Large ones, and those that need more, wait
for each other in a separate lane, so that they do not delay ordinary ones.
"""

import asyncio
import pickle
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from baton.bounded.lanes import Answer
from baton.bounded.process import FAULTS, Bound, BoundedProcess
from baton.bounded.turns import Turns
from baton.core.errors import BatonError, ConfigError, InternalError, InvalidRequest, Overloaded
from baton.gateway.text.chat.checkpoint import Checkpoint
from baton.gateway.text.chat.prepared import unpacked
from baton.gateway.text.chat.types import ChatRequest, PreparedChat

_MIB = 1 << 20
_LARGE_BYTES = 1 << 20
# Most memory per byte of a conversation during rendering: the message to the process, its values, the template's
# pieces, the prompt and the answer, with up to four bytes per character.
_BYTES_PER_BYTE = 24
_CURE = "send a shorter conversation, or start the gateway with another template: --chat-template FILE"
_CURE_AT_START = "start the gateway with another template: --chat-template FILE"
_MOMENT, _LONG = range(2)  # lanes


@dataclass(frozen=True)
class RenderBounds:
    """Limits of one rendering.

    Attributes:
        moment_cpu_s: CPU seconds of the first try, which may include compiling the template.
        cpu_s: CPU seconds of the second try.
        memory_bytes: memory in addition to the process's own and to the allowance for a large conversation.
    """

    moment_cpu_s: float = 0.5
    cpu_s: float = 3.0
    memory_bytes: int = 128 * _MIB


DEFAULT_BOUNDS = RenderBounds()


class ChatRenderer:
    """Renders conversations in a process, which starts at first use and ends with `close` or with its parent.

    Use it on one event loop only.

    Args:
        aliases: see `ChatModel`.
    """

    def __init__(
        self, checkpoint: Checkpoint, bounds: RenderBounds = DEFAULT_BOUNDS, *, aliases: Mapping[str, str] | None = None
    ) -> None:
        self._bounds = bounds
        self._has_template = bool(checkpoint.templates)
        self._turns = Turns(2)
        facts = {**vars(checkpoint), "special": sorted(checkpoint.special), "aliases": dict(aliases or {})}
        self._process = BoundedProcess("baton.gateway.text.chat.rendering", "render chat templates", facts, lanes=2)

    @property
    def pid(self) -> int | None:
        """Pid of the rendering process; None if it does not run."""
        return self._process.pid

    async def check(self) -> None:
        """Compiles the templates and renders a short conversation.

        Raises:
            ConfigError: a text is not a jinja template, or takes too much time or memory.
        """
        if not self._has_template:
            return
        answer, _ = await self._ask_in_turn(None, "", _MOMENT)
        if "failed" in answer:
            raise ConfigError(**answer["failed"])
        if "bytes" not in answer:
            error = self._error(answer, "a short conversation")
            raise ConfigError(error.message, field="chat_template", cure=_CURE_AT_START)

    async def prepare(self, request: ChatRequest, *, size_bytes: int = 0, client: str = "") -> PreparedChat:
        """Runs `ChatModel.prepare` in the process.

        Args:
            size_bytes: approximate size of the request.
            client: name of the client; clients take turns.

        Raises:
            InvalidRequest: the request cannot be rendered, or takes too much time or memory.
            Overloaded: the request cannot be rendered now.
        """
        is_large = size_bytes > _LARGE_BYTES
        try:
            answer, made = await self._ask_in_turn(request, client, _LONG if is_large else _MOMENT)
        except RecursionError:
            raise InvalidRequest("the conversation is nested too deeply", field="messages") from None
        if "bytes" not in answer:
            raise self._error(answer, "the conversation")
        return await asyncio.to_thread(unpacked, made) if is_large else unpacked(made)

    def close(self) -> None:
        """Ends the process. Waiting requests raise Overloaded."""
        self._process.close()

    async def _ask_in_turn(self, request: ChatRequest | None, client: str, first: int) -> tuple[Answer, bytes]:
        for lane in range(first, _LONG):
            answer, made = await self._turns.run(lane, client, partial(self._ask, lane, request))
            if answer.get("signal") != signal.SIGPROF:
                return answer, made
        return await self._turns.run(_LONG, client, partial(self._ask, _LONG, request))

    async def _ask(self, lane: int, request: ChatRequest | None) -> tuple[Answer, bytes]:
        """Renders in a lane.

        Args:
            request: the conversation; None: check the templates.
        """
        pickled = await asyncio.to_thread(pickle.dumps, request) if lane == _LONG else pickle.dumps(request)
        bounds = self._bounds
        memory_bytes = bounds.memory_bytes + _BYTES_PER_BYTE * len(pickled)
        cpu_s = bounds.moment_cpu_s if lane == _MOMENT else bounds.cpu_s
        return await self._process.ask(lane, {}, pickled, Bound(cpu_s, memory_bytes))

    def _error(self, answer: Answer, what: str) -> BatonError:
        if "refused" in answer:
            return InvalidRequest(**answer["refused"])
        if "failed" in answer:
            return InternalError(**answer["failed"])
        ended_by = answer.get("signal", 0)
        if ended_by == signal.SIGPROF:
            took = f"{self._bounds.cpu_s:g} s of CPU time"
        elif ended_by in FAULTS:
            took = f"{self._bounds.memory_bytes // _MIB} MiB of memory plus {_BYTES_PER_BYTE} times its size"
        else:
            why = answer.get("untried") or f"{signal.Signals(ended_by).name} ended it"
            return Overloaded(f"the chat template cannot be rendered now: {why}", retry_after_s=1.0)
        return InvalidRequest(f"the chat template takes more than {took} for {what}", field="messages", cure=_CURE)
