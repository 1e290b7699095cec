"""The client of one request: compares its tokens with the tokens that one process alone computes (I4, I5)."""

from collections.abc import Set

from baton.client.resumption import AnswerProgress
from baton.core.errors import (
    BatonError,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    Draining,
    InternalError,
    NoNode,
    Overloaded,
)
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.convert import finish_reason_from_proto, prompt_logprobs_from_proto
from tests.simulation.invariants import violated
from tests.simulation.reference import generate, prompt_logprobs
from tests.simulation.scenario import Client


class ClientCall:
    """One request as its client sees it.

    Args:
        contexts: longest prompt plus output of the nodes that may decode it. Its output may end at each of them.

    Attributes:
        ended: the last message or an error came, or the gateway died and the request does not go on at another one.
        waits: for another gateway.
    """

    def __init__(self, number: int, client: Client, *, contexts: Set[int]) -> None:
        self.name = f"r{number}"
        self.client = client
        self.ended = False
        self.error: BatonError | None = None
        self.finished = False
        self._expected = [generate(client.prompt, client.max_tokens, context) for context in contexts]
        self._shortest_context = min(contexts)
        self._longest = max((output.tokens for output in self._expected), key=len)
        self._tokens: list[int] = []
        self._text = ""
        self._first = False  # whether the message at hand is the first one with tokens
        self.waits = False
        self._progress = AnswerProgress(pb.GenerateRequest()) if client.resumes else None

    def receive(self, message: pb.GenerateResponse) -> None:
        if self.ended or self.finished:
            violated("I5", f"{self.name} gets a message after its end")
        if self._progress is not None:
            passed = self._progress.take(message)
            if passed is None:
                return
            message = passed
        self._first = not self._tokens and bool(message.tokens)
        for token in message.tokens:
            position = len(self._tokens)
            if token.index != position:
                violated("I4", f"{self.name} gets token {token.index} when {position} is due")
            if position >= len(self._longest) or self._longest[position] != token.token_id:
                violated("I4", f"{self.name} gets {token.token_id} as token {position} of {self._longest}")
            self._tokens.append(token.token_id)
        self._check_prompt(message)
        self._text += message.text
        if message.finish_reason:
            self.finished = True
            reason = finish_reason_from_proto(message.finish_reason)
            if (tuple(self._tokens), reason) not in self._expected:
                violated("I4", f"{self.name} ends by {reason} after {self._tokens}, not as one of {self._expected}")
            if message.usage.completion_tokens != len(self._tokens):
                violated("I4", f"{self.name} is charged for {message.usage.completion_tokens} tokens")
            if self._text != text_of(self._tokens, stopped=reason == "stop"):
                violated("I4", f"{self.name} gets the text {self._text!r} for {self._tokens}")

    def _check_prompt(self, message: pb.GenerateResponse) -> None:
        """The prompt's logprobs come in the first message with tokens, and in no other."""
        wanted = self.client.prompt_logprobs
        expected = [] if wanted is None or not self._first else prompt_logprobs(self.client.prompt, wanted)
        if list(prompt_logprobs_from_proto(message.prompt_logprobs)) != expected:
            violated("I4", f"{self.name} gets prompt logprobs {message.prompt_logprobs}, and {expected} are due")

    def end(self, error: BatonError | None) -> None:
        if self.ended:
            violated("I5", f"{self.name} ends twice")
        if (error is None) != self.finished:
            violated(
                "I5", f"{self.name} ends with {error!r}, and its last message has {'' if self.finished else 'not '}come"
            )
        self.ended = True
        self.waits = False
        self.error = error

    def check_error(self, *, steps_fail: bool) -> None:
        """I5: the error is one that the faults of this run can cause.

        Args:
            steps_fail: an engine step failed in this run.
        """
        allowed: list[type[BatonError]] = [DataLoss, Draining, NoNode, Overloaded]
        if steps_fail:
            allowed.append(InternalError)
        if self.client.cancel_s is not None:
            allowed.append(Cancelled)
        # All faults are over long before the deadline of a patient client. But what a node with a longer context began
        # waits for that one, which may have become a node that does not decode.
        outgrown = len(self.client.prompt) + len(self._tokens) >= self._shortest_context
        if outgrown or not self.client.patient:
            allowed.append(DeadlineExceeded)
        if self.error is not None and not isinstance(self.error, tuple(allowed)):
            violated("I5", f"{self.name} ends with {self.error!r}")

    @property
    def outcome(self) -> str:
        """How it ended, in one word."""
        if self.finished:
            return "finished"
        return "lost gateway" if self.error is None else type(self.error).__name__

    def lose_gateway(self) -> None:
        """The gateway died: the client gets nothing more of it, and no error but a broken stream."""
        if self.finished or self._progress is None:
            self.ended = True
        elif not self.ended:
            self.waits = True

    def resume(self) -> tuple[int, ...]:
        """The request goes on at another gateway; returns the tokens with which it begins there."""
        self.waits = False
        assert self._progress is not None
        return tuple(self._progress.request().output_token_ids)


def text_of(tokens: list[int], *, stopped: bool) -> str:
    """The text that `Detokenizer` makes of an output; a stop token is not part of the text."""
    return "".join(f"{token} " for token in (tokens[:-1] if stopped else tokens))


class Detokenizer:
    """Every token's text is its number."""

    held = ""

    def push(self, *token_ids: int) -> str:
        return "".join(f"{token_id} " for token_id in token_ids)

    def finish(self) -> str:
        return ""
