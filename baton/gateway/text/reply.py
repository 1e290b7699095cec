"""The messages to the client of one request: text and tokens as they come, and the last message. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.errors import InvalidRequest
from baton.core.sampling import ResolvedSampling
from baton.core.types import Receipt, Usage
from baton.gateway.core.request import OutputEnd
from baton.protos.internal.v1 import decode_pb2
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.convert import receipt_to_proto, usage_to_proto


@dataclass(frozen=True)
class Passed:
    """Text that may be shown, and the stop string that ends it, if one was found."""

    text: str
    stop: str | None = None


class StopStrings:
    """Passes text on, and holds back only what may be the beginning of a stop string.

    Of several stop strings the first complete one wins; of several that end at the same character, the longest. So the
    result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self._beginnings = frozenset(stop[:length] for stop in stops for length in range(1, len(stop)))
        self._longest = max(map(len, self._beginnings), default=0)

    def would_stop(self, text: str, *, searched: int = 0) -> bool:
        """Whether this text would complete a stop string if it came next; `searched` as in `push`."""
        return self._find(self._held + text, len(self._held) + searched) is not None

    def push(self, text: str, *, may_stop: bool = True, searched: int = 0) -> Passed:
        """Takes the text of some more tokens.

        Args:
            may_stop: whether a stop string that this text completes counts; one that it only begins may count later.
            searched: characters of the text at its beginning that complete no stop string that counts.
        """
        new_from = len(self._held) + searched
        text = self._held + text
        found = self._find(text, new_from) if may_stop else None
        if found is None:
            shown = len(text) - self._unsure(text)
            self._held = text[shown:]
            return Passed(text[:shown])
        self._held = ""
        start, stop = found
        return Passed(text[: start + len(stop)] if self._include_stop else text[:start], stop)

    def finish(self) -> str:
        """Returns the text that was held back: no stop string can follow any more."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, new_from: int) -> tuple[int, str] | None:
        """Start and text of the stop string that is complete first; none is complete before `new_from`."""
        best: tuple[int, int, str] | None = None  # end, start, stop
        for stop in self._stops:
            start = text.find(stop, max(0, new_from + 1 - len(stop)))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _unsure(self, text: str) -> int:
        """Length of the longest suffix of the text that begins a stop string."""
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


class Detokenizing(Protocol):
    """Turns one output's tokens into text, as `baton.gateway.text.detokenizer.Detokenizer` does."""

    @property
    def held(self) -> str: ...

    def push(self, *token_ids: int) -> str: ...

    def finish(self) -> str: ...


class Reply:
    """Collects tokens in the next message, and writes the last message."""

    def __init__(self, request_id: str, sampling: ResolvedSampling, detokenizer: Detokenizing) -> None:
        self.completion_tokens = 0
        self._request_id = request_id
        self._sampling = sampling
        self._detokenizer = detokenizer
        self._stops = StopStrings(sampling.stop, include_stop=sampling.include_stop) if sampling.stop else None
        self._searched = 0  # characters of the detokenizer's held text that were searched for stop strings
        self._begun = False  # the first message was taken
        self._stopped = False  # by a stop string: no text after it is shown
        self._tokens: list[common_pb2.Token] = []  # until `take`, as are the next three
        self._shown: list[int] = []  # tokens whose text is still to be made
        self._text = ""
        self._prompt_logprobs: Sequence[common_pb2.PromptLogprob] = ()

    def resume(self, output: Sequence[int], end: OutputEnd | None) -> tuple[list[str], OutputEnd | None]:
        """Goes on after tokens that the client has. Returns what each of them added to the text, where it is shown, and
        how the output ends with them; None: more tokens are due.

        Args:
            end: how it ends with its last token, stop strings apart.

        Raises:
            InvalidRequest: the output would have ended before all of them.
        """
        self.completion_tokens = len(output)
        stopped = end is not None and end.reason == common_pb2.FINISH_REASON_STOP
        shown = output[:-1] if stopped and not self._sampling.include_stop else output
        if self._stops is None:
            return [self._detokenizer.push(token_id) for token_id in shown], end
        texts = []
        for count, token_id in enumerate(shown, 1):
            passed = self._pass_on(self._stops, token_id, may_stop=count > self._sampling.min_tokens)
            texts.append(passed.text)
            if passed.stop is None:
                continue
            if count < len(output):
                what = f"output_token_ids go on after the stop string {passed.stop!r}"
                raise InvalidRequest(what, field="output_token_ids", value=passed.stop)
            self._stopped = True
            end = OutputEnd(common_pb2.FINISH_REASON_STOP, passed.stop)
        return texts, end

    def add(self, step_tokens: Iterable[decode_pb2.StepToken]) -> OutputEnd | None:
        """Adds the next tokens to the message in progress, up to one that ends the output; returns how it does."""
        searched = self._stops is not None
        for step_token in step_tokens:
            token = step_token.token
            if not self.completion_tokens:
                self._prompt_logprobs = step_token.prompt_logprobs
            self._tokens.append(token)
            self.completion_tokens += 1
            if searched or step_token.finish_reason:
                if (end := self._add_text(step_token)) is not None:
                    return end
            else:
                self._shown.append(token.token_id)
        return None

    def _add_text(self, step_token: decode_pb2.StepToken) -> OutputEnd | None:
        """The text of a token that may end the output."""
        token_id, reason = step_token.token.token_id, step_token.finish_reason
        end = OutputEnd(reason, step_token.stop_reason) if reason else None
        if reason == common_pb2.FINISH_REASON_STOP and not self._sampling.include_stop:
            return end  # the token itself is the stop: it is not part of the text
        if self._stops is None:
            self._shown.append(token_id)
            return end
        # As with stop tokens, a stop string counts only if it is complete once min_tokens tokens have come.
        passed = self._pass_on(self._stops, token_id, may_stop=self.completion_tokens > self._sampling.min_tokens)
        self._text += passed.text
        if passed.stop is None:
            return end
        self._stopped = True
        return OutputEnd(common_pb2.FINISH_REASON_STOP, passed.stop)

    def _pass_on(self, stops: StopStrings, token_id: int, *, may_stop: bool) -> Passed:
        """The text of a token. A stop string counts as soon as the tokens so far decode to it, even if the detokenizer
        holds its last characters back."""
        was_valid = bool(self._detokenizer.held)
        text, searched = self._detokenizer.push(token_id), self._searched
        held = self._detokenizer.held
        if held:
            self._searched = len(held)
            if may_stop and stops.would_stop(held, searched=searched):
                return stops.push(self._detokenizer.finish(), searched=searched)
        elif text:
            self._searched = 0
            return stops.push(text, may_stop=may_stop, searched=searched if was_valid else 0)
        return Passed("")

    def take(self) -> pb.GenerateResponse | None:
        """Returns the message with the tokens added since the last call; None: there are none."""
        tokens = self._tokens
        if not tokens:
            return None
        text = self._text if self._stops is not None else self._detokenizer.push(*self._shown)
        message = pb.GenerateResponse()  # filled in this way, it takes two thirds of the time
        message.text = text
        message.tokens.extend(tokens)
        if not self._begun:
            self._begun = True
            message.request_id = self._request_id
            message.prompt_logprobs.extend(self._prompt_logprobs)
            self._prompt_logprobs = ()
        self._tokens, self._shown, self._text = [], [], ""
        return message

    def last(self, end: OutputEnd, usage: Usage, receipt: Receipt) -> pb.GenerateResponse:
        """The last message: the text that was held back, how the output ended, usage and receipt."""
        return pb.GenerateResponse(
            request_id=self._request_id,
            text="" if self._stopped else self._held_back(),
            finish_reason=end.reason,
            stop_reason=end.stop_reason,
            usage=usage_to_proto(usage),
            receipt=receipt_to_proto(receipt),
        )

    def _held_back(self) -> str:
        searched = self._searched if self._detokenizer.held else 0
        text = self._detokenizer.finish()
        if self._stops is None:
            return text
        return self._stops.push(text, searched=searched).text + self._stops.finish()
