"""The output of one request: orders its tokens, makes the messages to the client, and notices the end. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from baton.core.errors import InternalError
from baton.core.types import FinishReason, Receipt, Usage
from baton.gateway.core.request import OutputEnd, Request
from baton.gateway.request.commands import Respond
from baton.gateway.request.receipt import ReceiptDraft
from baton.gateway.text.reply import Detokenizing, Reply
from baton.protos.internal.v1 import decode_pb2
from baton.rpc.convert import finish_reason_from_proto
from baton.rpc.revisions import answer_revision


class TokenOrder:
    """Puts tokens in order: the tokens passed on so far, and tokens that arrived early.

    The first token of a hand-over comes from the prefill node. All later ones come from the decode node on another
    connection, which may be faster.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []  # passed on
        self._early: dict[int, decode_pb2.StepToken] = {}

    def offer(self, step_tokens: Iterable[decode_pb2.StepToken], *, hold: bool) -> Iterator[decode_pb2.StepToken]:
        """Yields the tokens that are next in order and keeps early ones. Drops tokens that were passed on before.

        Args:
            hold: whether a missing token may still come from another node.

        Raises:
            InternalError: a token is missing and no node will send it.
        """
        token_ids, early = self.token_ids, self._early
        for step_token in step_tokens:
            token = step_token.token
            index, num_passed = token.index, len(token_ids)
            if index == num_passed:
                token_ids.append(token.token_id)
                yield step_token
                if early:  # rare
                    yield from self._follow()
            elif index > num_passed:
                if not hold:
                    raise self._gap(index)
                early[index] = step_token

    def _follow(self) -> Iterator[decode_pb2.StepToken]:
        """Yields the early tokens that are next in order now."""
        while self._early:
            following = self._early.pop(len(self.token_ids), None)
            if following is None:
                raise self._gap(min(self._early))
            self.token_ids.append(following.token.token_id)
            yield following

    def forget_early(self) -> None:
        """Drops the early tokens. Called when the node that sent them leaves the request."""
        self._early.clear()

    def _gap(self, index: int) -> InternalError:
        return InternalError(
            f"token {index} of the output arrived, but token {len(self.token_ids)} was expected",
            field="index",
            value=index,
        )


class TokenMeter(Protocol):
    """Counts tokens as they are passed on: `baton.gateway.observe.meter.RequestMeter`."""

    def first(self, seconds: float, tokens: int, prompt_tokens: int) -> None:
        """Counts the first message of an output, `seconds` after its request's arrival."""

    def next(self, seconds: float, tokens: int) -> None:
        """Counts a further message, `seconds` after the one before it."""


class NoMeter:
    """Counts nothing."""

    def first(self, seconds: float, tokens: int, prompt_tokens: int) -> None:
        pass

    def next(self, seconds: float, tokens: int) -> None:
        pass


@dataclass(frozen=True)
class Ended:
    """Summary of an output that was served to its end. `reason` is None if this version does not know the node's."""

    reason: FinishReason | None
    usage: Usage
    receipt: Receipt


class RequestOutput:
    """The output of one request, from its first token to its last message.

    Attributes:
        end: end of the output; None: more tokens are due.
        ended: summary of the output, set by its last message.
        first_token_at_s: time at which the first token was passed on; None: not yet.
        revision: revision of the weights on the node that has the request.
    """

    def __init__(self, request: Request, detokenizer: Detokenizing, meter: TokenMeter) -> None:
        self.end: OutputEnd | None = None
        self.ended: Ended | None = None
        self._meter = meter
        self._passed_on_at_s = 0.0  # time of the last message with tokens
        self._request = request
        self._order = TokenOrder()
        self._reply = Reply(request.request_id, request.sampling, detokenizer)
        self.first_token_at_s: float | None = None
        self.revision = ""

    @property
    def token_ids(self) -> list[int]:
        """The tokens that the client has or is about to get."""
        return self._order.token_ids

    @property
    def completion_tokens(self) -> int:
        return self._reply.completion_tokens

    def resume(self) -> list[str]:
        """Continues after the tokens that the client has. Returns the text that each of them added.

        Raises:
            InvalidRequest: the output would have ended before all of these tokens.
        """
        self._order.token_ids.extend(self._request.output)
        texts, self.end = self._reply.resume(self._request.output, self._request.ended)
        return texts

    def add(self, step_tokens: Iterable[decode_pb2.StepToken], *, hold: bool) -> bool:
        """Adds a node's tokens, then early ones that are next in order; returns whether the output has ended with them.

        Tokens after the end are ignored.

        Args:
            hold: whether a missing token may still come from another node.

        Raises:
            InternalError: a token is missing and no node will send it.
        """
        if self.end is not None:
            return False
        self.end = self._reply.add(self._order.offer(step_tokens, hold=hold))
        return self.end is not None

    def forget_early(self) -> None:
        """Drops the early tokens. Called when the node that sent them leaves the request."""
        self._order.forget_early()

    def message(self, draft: ReceiptDraft, now_s: float) -> list[Respond]:
        """The message with the tokens since the last message; an empty list if there are none."""
        message = self._reply.take()
        if message is None:
            return []
        tokens = len(message.tokens)
        if self.first_token_at_s is None:
            self.first_token_at_s = now_s
            prompt_tokens = len(self._request.prompt)
            message.revision = answer_revision(self.revision, self._request.adapter)
            message.prompt_usage.prompt_tokens = prompt_tokens
            message.prompt_usage.cached_tokens = min(draft.cached_tokens, prompt_tokens)
            self._meter.first(now_s - self._request.started_at_s, tokens, prompt_tokens)
        else:
            self._meter.next(now_s - self._passed_on_at_s, tokens)
        self._passed_on_at_s = now_s
        return [Respond(message)]

    def last_message(self, draft: ReceiptDraft, now_s: float) -> Respond:
        """The message with usage and receipt, after all tokens were sent."""
        assert self.end is not None, "only a finished output has a last message"
        started_at_s, prompt_tokens = self._request.started_at_s, len(self._request.prompt)
        first_token_at_s = now_s if self.first_token_at_s is None else self.first_token_at_s
        usage = Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=min(draft.cached_tokens, prompt_tokens),
        )
        receipt = draft.finish(ttft_s=first_token_at_s - started_at_s, total_s=now_s - started_at_s)
        self.ended = Ended(finish_reason_from_proto(self.end.reason), usage, receipt)
        return Respond(self._reply.last(self.end, usage, receipt))
