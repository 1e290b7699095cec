"""What the client of one request has and gets next: tokens in their order, messages, and the output's end. Pure."""

from baton.types import Usage
from gateway.commands import Respond
from gateway.receipt import ReceiptDraft
from gateway.reply import Detokenizing, OutputEnd, Reply
from gateway.request import Request
from gateway.token_order import TokenOrder
from protos.baton.v1 import decode_pb2


class Output:
    """The output of one request, from its first token to its last message.

    Attributes:
        end: how it ended; None: more tokens are due.
        first_token_at_s: when the first token was passed on; None: not yet.
    """

    def __init__(self, request: Request, detokenizer: Detokenizing) -> None:
        self.end: OutputEnd | None = None
        self._request = request
        self._order = TokenOrder()
        self._reply = Reply(request.request_id, request.sampling, detokenizer)
        self.first_token_at_s: float | None = None

    @property
    def token_ids(self) -> list[int]:
        """The tokens of which the client has or gets each one."""
        return self._order.token_ids

    @property
    def completion_tokens(self) -> int:
        return self._reply.completion_tokens

    def resume(self) -> str:
        """Goes on after the tokens that the client has. Returns their text, as far as it was shown.

        Raises:
            InvalidRequest: the output would have ended before all of them.
        """
        self._order.token_ids.extend(self._request.output)
        text, self.end = self._reply.resume(self._request.output, self._request.ended)
        return text

    def add(self, step_token: decode_pb2.StepToken, *, hold: bool) -> bool:
        """Adds a node's token, and early ones whose turn it is then; returns whether that ended the output.

        Tokens after its end are ignored.

        Args:
            hold: the token before this one may still come from another node.

        Raises:
            InternalError: a token is missing, and no node will send it.
        """
        if self.end is not None:
            return False
        for due in self._order.offer(step_token, hold=hold):
            self.end = self._reply.add(due)
            if self.end is not None:
                return True
        return False

    def forget_early(self) -> None:
        """Drops the early tokens: the node that sent them does not continue the request."""
        self._order.forget_early()

    def message(self, now_s: float) -> list[Respond]:
        """The message with the tokens since the last one; empty without any."""
        message = self._reply.take()
        if message is None:
            return []
        if self.first_token_at_s is None:
            self.first_token_at_s = now_s
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
        receipt = draft.finish(first_token_s=first_token_at_s - started_at_s, total_s=now_s - started_at_s)
        return Respond(self._reply.last(self.end, usage, receipt))
