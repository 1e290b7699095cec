"""Converts between plain types and the protobuf messages of requests and answers.

Converting a message also checks it: a value that breaks a rule of `baton.core.types` raises that rule's error.
"""

from collections.abc import Iterable
from typing import Any

from baton.core.errors import InvalidRequest, PeerRefused
from baton.core.types import (
    AdapterRef,
    FinishReason,
    Grammar,
    GrammarKind,
    Path,
    PromptLogprob,
    Receipt,
    SamplingParams,
    Slo,
    TokenOutput,
    Usage,
)
from baton.protos.v1 import common_pb2 as pb

_FINISH_REASONS = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}
_FINISH_REASONS_BACK = {number: reason for reason, number in _FINISH_REASONS.items()}
_GRAMMAR_KINDS = {pb.GrammarKind.Value(f"GRAMMAR_KIND_{kind.name}"): kind for kind in GrammarKind}
_PATHS = {Path.REMOTE: pb.PATH_REMOTE, Path.LOCAL: pb.PATH_LOCAL, Path.SPLIT: pb.PATH_SPLIT}
_PATHS_BACK = {number: path for path, number in _PATHS.items()}


def role_name(role: pb.Role.ValueType) -> str:
    """As in flags and logs: "decode"; "unknown" where none is given, "role 7" for one of a newer version."""
    return _enum_name(pb.Role, "ROLE_", role)


def phase_name(phase: pb.PeerPhase.ValueType) -> str:
    """As `role_name`."""
    return _enum_name(pb.PeerPhase, "PEER_PHASE_", phase)


def _enum_name(enum: Any, prefix: str, number: int) -> str:
    if not number:
        return "unknown"
    name = enum.Name(number).removeprefix(prefix) if number in enum.values() else f"{prefix}{number}"
    return str(name).lower().replace("_", " ")


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    """Raises:
    InvalidRequest: a number is too large for the wire.
    """
    try:
        return pb.SamplingParams(
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=params.logit_bias,
            seed=params.seed,
            stop_token_ids=params.stop_token_ids,
            stop=params.stop,
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs,
            include_stop=params.include_stop,
            grammar=None if params.grammar is None else grammar_to_proto(params.grammar),
            skip_special_tokens=params.skip_special_tokens,
            prompt_logprobs=params.prompt_logprobs,
        )
    except ValueError as error:
        raise InvalidRequest(f"a sampling parameter cannot be sent: {error}", field="sampling") from None


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Absent fields take the defaults.

    Raises:
        InvalidRequest: a value is not a number or is out of range; names it.
    """
    # NOTE: message and dataclass use the same field names; ListFields yields the fields that are set.
    given = {field.name: value for field, value in message.ListFields()}
    given["logit_bias"] = dict(message.logit_bias)
    given["stop_token_ids"] = tuple(message.stop_token_ids)
    given["stop"] = tuple(message.stop)
    given["grammar"] = grammar_from_proto(message.grammar) if message.HasField("grammar") else None
    return SamplingParams(**given)


def grammar_to_proto(grammar: Grammar) -> pb.Grammar:
    return pb.Grammar(kind=pb.GrammarKind.Value(f"GRAMMAR_KIND_{grammar.kind.name}"), text=grammar.text)


def grammar_from_proto(message: pb.Grammar) -> Grammar:
    """Raises:
    InvalidRequest: the kind is missing or unknown.
    """
    try:
        return Grammar(_GRAMMAR_KINDS[message.kind], message.text)
    except KeyError:
        allowed = tuple(kind.name for kind in GrammarKind)
        raise InvalidRequest(
            f"grammar.kind is {message.kind}", field="grammar.kind", value=message.kind, allowed=allowed
        ) from None


def token_to_proto(token: TokenOutput) -> pb.Token:
    return pb.Token(
        token_id=token.token_id,
        index=token.index,
        logprob=token.logprob,
        top_logprobs=[pb.TokenLogprob(token_id=token_id, logprob=value) for token_id, value in token.top_logprobs],
    )


def token_from_proto(message: pb.Token) -> TokenOutput:
    return TokenOutput(
        token_id=message.token_id,
        index=message.index,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple((top.token_id, top.logprob) for top in message.top_logprobs),
    )


def prompt_logprobs_from_proto(messages: Iterable[pb.PromptLogprob]) -> tuple[PromptLogprob, ...]:
    return tuple(
        PromptLogprob(
            message.token_id,
            message.logprob if message.HasField("logprob") else None,
            tuple((top.token_id, top.logprob) for top in message.top_logprobs),
        )
        for message in messages
    )


def finish_reason_to_proto(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    """None means not finished yet: FINISH_REASON_UNSPECIFIED."""
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_REASONS[reason]


def finish_reason_from_proto(number: pb.FinishReason.ValueType) -> FinishReason | None:
    return _FINISH_REASONS_BACK.get(number)


def slo_from_proto(message: pb.Slo) -> Slo:
    """Raises:
    InvalidRequest: a bound is not above 0.
    """
    return Slo(
        message.ttft_s if message.HasField("ttft_s") else None,
        message.tpot_s if message.HasField("tpot_s") else None,
    )


def adapter_to_proto(adapter: AdapterRef) -> pb.Adapter:
    return pb.Adapter(name=adapter.name, revision=adapter.revision)


def adapter_from_proto(message: pb.Adapter) -> AdapterRef | None:
    """None: the message is empty, which means the base model."""
    return AdapterRef(message.name, message.revision) if message.name else None


def usage_to_proto(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def usage_from_proto(message: pb.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens,
    )


def receipt_to_proto(receipt: Receipt) -> pb.Receipt:
    return pb.Receipt(
        path=_PATHS[receipt.path],
        why=receipt.why,
        prefill_node=receipt.prefill_node,
        decode_node=receipt.decode_node,
        prompt_tokens_sent=receipt.prompt_tokens_sent,
        bytes_sent=receipt.bytes_sent,
        segments=receipt.segments,
        transport=receipt.transport,
        queue_s=receipt.queue_s,
        prefill_s=receipt.prefill_s,
        transfer_s=receipt.transfer_s,
        first_token_s=receipt.first_token_s,
        total_s=receipt.total_s,
        attempts=receipt.attempts,
        prefill_cached_tokens=receipt.prefill_cached_tokens,
        segment_bytes=receipt.segment_bytes,
        kv_converted=receipt.kv_converted,
        layer_groups=receipt.layer_groups,
        predicted_ttft_s=receipt.predicted_ttft_s,
        split_tokens=receipt.split_tokens,
        revision=receipt.revision,
        revision_name=receipt.revision_name,
        prefill_version=receipt.prefill_version,
        decode_version=receipt.decode_version,
    )


def receipt_from_proto(message: pb.Receipt) -> Receipt:
    """Raises:
    PeerRefused: the receipt names no path that is known here.
    """
    path = _PATHS_BACK.get(message.path)
    if path is None:
        cure = "use the same version on both sides"
        raise PeerRefused(f"a receipt names path {message.path}", field="path", value=message.path, cure=cure)
    return Receipt(
        path=path,
        why=message.why,
        prefill_node=message.prefill_node,
        decode_node=message.decode_node,
        prompt_tokens_sent=message.prompt_tokens_sent,
        bytes_sent=message.bytes_sent,
        segments=message.segments,
        transport=message.transport,
        queue_s=message.queue_s,
        prefill_s=message.prefill_s,
        transfer_s=message.transfer_s,
        first_token_s=message.first_token_s,
        total_s=message.total_s,
        attempts=message.attempts,
        prefill_cached_tokens=message.prefill_cached_tokens,
        segment_bytes=message.segment_bytes,
        kv_converted=message.kv_converted,
        layer_groups=message.layer_groups,
        predicted_ttft_s=message.predicted_ttft_s if message.HasField("predicted_ttft_s") else None,
        split_tokens=message.split_tokens,
        revision=message.revision,
        revision_name=message.revision_name,
        prefill_version=message.prefill_version,
        decode_version=message.decode_version,
    )
