"""The messages with one engine step's tokens: one for each gateway's session. Pure."""

from collections.abc import Mapping, Sequence

from baton.core.types import TokenOutput
from baton.engine.events import DraftsChecked, PromptScored, StepEvents, TokenSampled
from baton.node.prompt_logprobs import add_prompt_logprobs
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.v1 import common_pb2
from baton.rpc.convert import finish_reason_to_proto, set_logprobs
from decode_node.decode_task import DecodePhase, DecodeTask

_FEW = 64  # tokens that cost next to nothing to copy


class StepMessages:
    """Makes the messages of one step after another, from the same parts."""

    def __init__(self) -> None:
        self._kept: dict[int, _KeptMessage] = {}  # by session

    def session_closed(self, session: int) -> None:
        self._kept.pop(session, None)

    def of(
        self, events: StepEvents, tasks: Mapping[str, DecodeTask], now_s: float
    ) -> tuple[dict[int, pb.SessionResponse], list[DecodeTask]]:
        """The messages of a step, by session, and the requests that have finished with it.

        Args:
            tasks: the node's requests by their ids in the engine. Tokens of other requests, and of ending ones, are
                left out.
        """
        by_session: dict[int, list[tuple[int, TokenOutput]]] = {}
        special: list[tuple[int, DecodeTask, TokenSampled]] = []  # tokens with more than a number, and their places
        decoding = DecodePhase.DECODING  # looked up once, not for every token
        drafts = {each.request_id: each for each in events.drafts}
        for sampled in events.tokens:
            request_id, token, finish_reason, _ = sampled
            task = tasks.get(request_id)
            if task is None or task.phase is not decoding:
                continue
            tokens = by_session.get(task.session)
            if tokens is None:
                tokens = by_session[task.session] = []
            if (
                finish_reason is not None
                or token.logprob is not None
                or task.prefill_started_s is not None
                or (drafts and request_id in drafts)
            ):
                special.append((len(tokens), task, sampled))
            tokens.append((task.key, token))
        messages = {session: self._message(session, tokens) for session, tokens in by_session.items()}
        for place, task, sampled in special:
            sent = messages[task.session].step.tokens[place]
            _complete(sent, task, sampled, drafts.pop(sampled.request_id, None), now_s)
        for scored in events.scored:
            if (task := tasks.get(scored.request_id)) is not None and task.session in messages:
                _add_prompt_logprobs(messages[task.session].step, task.key, scored)
        return messages, [task for _, task, sampled in special if sampled.finish_reason is not None]

    def _message(self, session: int, tokens: Sequence[tuple[int, TokenOutput]]) -> pb.SessionResponse:
        kept = self._kept.get(session)
        if kept is None or kept.is_too_large_for(len(tokens)):
            kept = self._kept[session] = _KeptMessage()
        return kept.filled(tokens)


class _KeptMessage:
    """A session's message, which every step fills again and then copies: this takes half of the time of making it."""

    def __init__(self) -> None:
        self._response = pb.SessionResponse(step=pb.Step())
        self._tokens: list[tuple[pb.StepToken, common_pb2.Token]] = []

    def is_too_large_for(self, num_tokens: int) -> bool:
        """Whether most of the message would be copied for nothing."""
        # NOTE: a message keeps the memory of deleted tokens, so none are deleted.
        return len(self._tokens) > _FEW + 2 * num_tokens

    def filled(self, tokens: Sequence[tuple[int, TokenOutput]]) -> pb.SessionResponse:
        """A new message with these tokens, each with its request's key."""
        add = self._response.step.tokens.add
        while len(self._tokens) < len(tokens):
            added = add()
            self._tokens.append((added, added.token))
        for (key, token), (sent, message) in zip(tokens, self._tokens, strict=False):
            sent.key = key
            message.token_id, message.index = token.token_id, token.index
        copied = pb.SessionResponse()
        copied.CopyFrom(self._response)
        del copied.step.tokens[len(tokens) :]
        return copied


def _complete(
    sent: pb.StepToken, task: DecodeTask, sampled: TokenSampled, checked: DraftsChecked | None, now_s: float
) -> None:
    """Adds what the token says besides its number."""
    _, token, finish_reason, stop_reason = sampled
    if token.logprob is not None:
        set_logprobs(sent.token, token)
    if task.prefill_started_s is not None:
        _add_prefill(sent, task, now_s)
    if checked is not None:
        sent.drafted_tokens, sent.accepted_tokens = checked.drafted, checked.accepted
    if finish_reason is not None:
        sent.finish_reason, sent.stop_reason = finish_reason_to_proto(finish_reason), stop_reason


def _add_prefill(sent: pb.StepToken, task: DecodeTask, now_s: float) -> None:
    """Adds the times of a prompt that was computed here to its first token."""
    assert task.prefill_started_s is not None, "only such a token has times"
    sent.queue_s = queue_s = task.prefill_queue_s
    sent.prefill_s, task.prefill_started_s = max(0.0, now_s - task.prefill_started_s - queue_s), None
    sent.prompt_chunks.extend(task.times.chunks.take())


def _add_prompt_logprobs(step: pb.Step, key: int, scored: PromptScored) -> None:
    """Adds prompt logprobs to the request's token, which the step has unless the request is ending."""
    for token in step.tokens:
        if token.key == key:
            add_prompt_logprobs(token, scored.logprobs)
