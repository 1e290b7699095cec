"""What the client of one request gets: text and tokens as they come, and the last message. Knows no node."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from baton.convert import receipt_to_proto, usage_to_proto
from baton.types import Receipt, SamplingParams, Usage
from gateway.stop import StopStrings
from gateway.text import Detokenizer
from protos.baton.v1 import common_pb2, decode_pb2
from protos.baton.v1 import generation_pb2 as pb

Write = Callable[[pb.GenerateResponse], Awaitable[object]]


@dataclass(frozen=True)
class Finish:
    """Why an output ended; `stop_reason` is the stop string or stop token id."""

    reason: common_pb2.FinishReason.ValueType
    stop_reason: str


class Reply:
    """Writes one message for each batch of tokens that comes, and one at the end."""

    def __init__(
        self,
        request_id: str,
        sampling: SamplingParams,
        detokenizer: Detokenizer,
        write: Write,
        clock: Callable[[], float],
    ) -> None:
        self.completion_tokens = 0
        self.first_token_at: float | None = None
        self._request_id = request_id
        self._sampling = sampling
        self._detokenizer = detokenizer
        self._stopped = False  # by a stop string: nothing is shown behind it
        self._stops = StopStrings(sampling.stop, include_stop=sampling.include_stop) if sampling.stop else None
        self._write = write
        self._clock = clock

    async def give(self, tokens: Sequence[decode_pb2.StepToken]) -> Finish | None:
        """Streams tokens in their order; says whether the output ends with them. What is behind an end is dropped."""
        response = pb.GenerateResponse()
        if self.first_token_at is None:
            response.request_id = self._request_id
        finish, text = None, ""
        for said in tokens:
            response.tokens.append(said.token)
            piece, finish = self._take(said)
            text += piece
            if finish is not None:
                break
        response.text = text
        if self.first_token_at is None:
            self.first_token_at = self._clock()
        await self._write(response)
        return finish

    async def end(self, finish: Finish, usage: Usage, receipt: Receipt) -> None:
        """The last message: what was held back of the text, how it ended, what it took."""
        await self._write(
            pb.GenerateResponse(
                text="" if self._stopped else self._rest(),
                finish_reason=finish.reason,
                stop_reason=finish.stop_reason,
                usage=usage_to_proto(usage),
                receipt=receipt_to_proto(receipt),
            )
        )

    def _take(self, said: decode_pb2.StepToken) -> tuple[str, Finish | None]:
        """The text that one token adds, and whether it is the last one."""
        self.completion_tokens += 1
        finish = Finish(said.finish_reason, said.stop_reason) if said.finish_reason else None
        if said.finish_reason == common_pb2.FINISH_REASON_STOP and not self._sampling.include_stop:
            return "", finish  # the token itself is the stop: it is not part of the text
        text = self._detokenizer.push(said.token.token_id)
        if self._stops is None:
            return text, finish
        # As with stop tokens, a stop string counts only if it is complete once min_tokens tokens have come.
        passed = self._stops.push(text, may_stop=self.completion_tokens > self._sampling.min_tokens)
        if passed.stop is not None:
            self._stopped = True
            finish = Finish(common_pb2.FINISH_REASON_STOP, passed.stop)
        return passed.text, finish

    def _rest(self) -> str:
        text = self._detokenizer.finish()
        return text if self._stops is None else self._stops.push(text).text + self._stops.finish()
