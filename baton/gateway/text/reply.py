"""Builds the messages to the client of one output: text and tokens as they arrive, and the last message. Pure."""

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
    """Text that may be sent, and the stop string that ends it, if one was found."""

    text: str
    stop: str | None = None


class StopStrings:
    """Finds stop strings in a text that arrives in pieces. Holds back only what may be the beginning of a stop string.

    The stop string that is complete first wins; of several that end at the same character, the longest. So the result
    does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = frozenset(stops)
        self._lengths = _lengths_by_end(stops)
        self._include_stop = include_stop
        self._held = ""
        self._beginnings = frozenset(stop[:length] for stop in stops for length in range(1, len(stop)))
        self._longest = max(map(len, self._beginnings), default=0)

    def would_stop(self, text: str, *, searched: int = 0) -> bool:
        """Whether this text, as the next piece, would complete a stop string; for `searched` see `push`."""
        return self._find(self._held + text, len(self._held) + searched) is not None

    def push(self, text: str, *, may_stop: bool = True, searched: int = 0) -> Passed:
        """Takes the next piece of text, and returns what may be sent.

        Args:
            may_stop: whether a stop string that ends in this piece counts; one that only begins here may count later.
            searched: number of characters at the piece's beginning in which no stop string ends.
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
        """Ends the text, and returns what was held back."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, new_from: int) -> tuple[int, str] | None:
        """Returns start and text of the stop string that is complete first, at or after `new_from`; None if none is."""
        for end in range(new_from + 1, len(text) + 1):
            for length in self._lengths.get(text[end - 1], ()):
                if text[max(0, end - length) : end] in self._stops:
                    return max(0, end - length), text[max(0, end - length) : end]
        return None

    def _unsure(self, text: str) -> int:
        """Returns the length of the text's longest suffix that begins a stop string."""
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


def _lengths_by_end(stops: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Returns the lengths of the stop strings by their last character, longest first.

    So the search looks at the few lengths that may end at a character, however many stop strings there are.
    """
    lengths: dict[str, set[int]] = {}
    for stop in stops:
        lengths.setdefault(stop[-1], set()).add(len(stop))
    return {last: tuple(sorted(found, reverse=True)) for last, found in lengths.items()}


class Detokenizing(Protocol):
    """The part of `Detokenizer` that `Reply` uses."""

    @property
    def held(self) -> str: ...

    def push(self, *token_ids: int) -> str: ...

    def finish(self) -> str: ...


class Reply:
    """Collects an output's tokens into messages, and builds the last message."""

    def __init__(self, request_id: str, sampling: ResolvedSampling, detokenizer: Detokenizing) -> None:
        self.completion_tokens = 0
        self._request_id = request_id
        self._sampling = sampling
        self._detokenizer = detokenizer
        self._stops = StopStrings(sampling.stop, include_stop=sampling.include_stop) if sampling.stop else None
        self._searched = 0  # characters of the detokenizer's held text that were searched for stop strings
        self._begun = False  # whether the first message was taken
        self._stopped = False  # by a stop string, after which no text is sent
        self._tokens: list[common_pb2.Token] = []  # cleared by `take`, as are the next three
        self._shown: list[int] = []  # tokens that are not detokenized yet
        self._text = ""
        self._prompt_logprobs: Sequence[common_pb2.PromptLogprob] = ()

    def resume(self, output: Sequence[int], end: OutputEnd | None) -> tuple[list[str], OutputEnd | None]:
        """Continues an output after tokens that the client already has.

        Returns the text that each shown token adds, and how the output ends with them, or None if it does not.

        Args:
            end: how the output ends with its last token, if stop strings are ignored.

        Raises:
            InvalidRequest: the output would have ended before its last token.
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
                what = f"output_token_ids continue after the stop string {passed.stop!r}"
                raise InvalidRequest(what, field="output_token_ids", value=passed.stop)
            self._stopped = True
            end = OutputEnd(common_pb2.FINISH_REASON_STOP, passed.stop)
        return texts, end

    def add(self, step_tokens: Iterable[decode_pb2.StepToken]) -> OutputEnd | None:
        """Adds tokens to the message in progress, up to one that ends the output. Returns how it ends, or None."""
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
        """Adds the text of a token that may end the output."""
        token_id, reason = step_token.token.token_id, step_token.finish_reason
        end = OutputEnd(reason, step_token.stop_reason) if reason else None
        if reason == common_pb2.FINISH_REASON_STOP and not self._sampling.include_stop:
            return end  # the token itself is the stop: it is not part of the text
        if self._stops is None:
            self._shown.append(token_id)
            return end
        # As with stop tokens, a stop string that is complete within the first min_tokens tokens does not count.
        passed = self._pass_on(self._stops, token_id, may_stop=self.completion_tokens > self._sampling.min_tokens)
        self._text += passed.text
        if passed.stop is None:
            return end
        self._stopped = True
        return OutputEnd(common_pb2.FINISH_REASON_STOP, passed.stop)

    def _pass_on(self, stops: StopStrings, token_id: int, *, may_stop: bool) -> Passed:
        """Searches the text of a token for stop strings, and returns what may be sent.

        A stop string counts as soon as the tokens decode to it, even if the detokenizer holds its last characters back.
        """
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
        """Returns a message with the tokens added since the last call, or None if there are none."""
        tokens = self._tokens
        if not tokens:
            return None
        text = self._text if self._stops is not None else self._detokenizer.push(*self._shown)
        message = pb.GenerateResponse()  # setting fields takes two thirds of the time of keyword arguments
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
        """Builds the last message: the text that was held back, how the output ended, usage and receipt."""
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
