"""Prepares conversations in another process, because nothing interrupts a template: a rendering that takes too much
ends a fork of that process (`baton.gateway.text.chat.rendering`), and its request is refused.

Every rendering gets a moment of CPU time. Those that need more, and large ones, wait for each other, so they delay no
ordinary ones.
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
# Memory of a conversation while it is rendered, at most: its question, its values, the template's pieces, the prompt
# and the answer, with up to four bytes a character.
_BYTES_PER_BYTE = 24
_CURE = "send a shorter conversation, or start the gateway with another template: --chat-template FILE"
_CURE_AT_START = "start the gateway with another template: --chat-template FILE"
_MOMENT, _LONG = range(2)  # lanes


@dataclass(frozen=True)
class RenderBounds:
    """What one rendering may take.

    Attributes:
        moment_cpu_s: of CPU time, at first. Includes compiling the template, which a new fork does.
        cpu_s: of CPU time, in a second try.
        memory_bytes: more than the process has without it, besides what a large conversation needs.
    """

    moment_cpu_s: float = 0.5
    cpu_s: float = 3.0
    memory_bytes: int = 128 * _MIB


DEFAULT_BOUNDS = RenderBounds()


class ChatRenderer:
    """Used on one event loop. The process starts at the first use, and ends with `close` or with its parent.

    Args:
        aliases: as of `ChatModel`.
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
        """Of the process that renders; None: there is none now."""
        return self._process.pid

    async def check(self) -> None:
        """Compiles the templates and renders a short conversation.

        Raises:
            ConfigError: a template is no jinja template, or takes too much.
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
        """What `ChatModel.prepare` returns or raises.

        Args:
            size_bytes: of the request, roughly.
            client: whose request it is.

        Raises:
            InvalidRequest: the request cannot be rendered, or takes too much.
            Overloaded: it cannot be rendered now.
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
        """Ends the process. A request that is waiting raises Overloaded."""
        self._process.close()

    async def _ask_in_turn(self, request: ChatRequest | None, client: str, first: int) -> tuple[Answer, bytes]:
        for lane in range(first, _LONG):
            answer, made = await self._turns.run(lane, client, partial(self._ask, lane, request))
            if answer.get("signal") != signal.SIGPROF:
                return answer, made
        return await self._turns.run(_LONG, client, partial(self._ask, _LONG, request))

    async def _ask(self, lane: int, request: ChatRequest | None) -> tuple[Answer, bytes]:
        """Asks the lane's process to render.

        Args:
            request: None: the check of the templates.
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
            took = f"{self._bounds.memory_bytes // _MIB} MiB of memory besides {_BYTES_PER_BYTE} times its size"
        else:
            why = answer.get("untried") or f"{signal.Signals(ended_by).name} ended it"
            return Overloaded(f"the chat template cannot be rendered now: {why}", retry_after_s=1.0)
        return InvalidRequest(f"the chat template takes more than {took} for {what}", field="messages", cure=_CURE)
