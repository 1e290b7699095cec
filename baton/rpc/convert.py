"""Converts between plain types and the protobuf messages of requests and answers.

Converting a message also checks it: a value that breaks a rule of `baton.core.types` raises that rule's error.
"""

import json
from collections.abc import Iterable
from typing import Any

from baton.core.errors import InvalidRequest, PeerRefused
from baton.core.sampling import SAMPLING_FIELDS, ResolvedSampling, SamplingParams
from baton.core.types import (
    AdapterRef,
    FinishReason,
    Grammar,
    GrammarKind,
    LoadedTokens,
    Path,
    PromptLogprob,
    Receipt,
    Slo,
    TokenOutput,
    Usage,
)
from baton.protos.v1 import common_pb2 as pb
from baton.protos.v1 import node_status_pb2

_FINISH_REASONS = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}
_FINISH_REASONS_BACK = {number: reason for reason, number in _FINISH_REASONS.items()}
_PATHS = {Path.REMOTE: pb.PATH_REMOTE, Path.LOCAL: pb.PATH_LOCAL, Path.SPLIT: pb.PATH_SPLIT}
_PATHS_BACK = {number: path for path, number in _PATHS.items()}


def role_name(role: node_status_pb2.Role.ValueType) -> str:
    """The role's name in flags and logs, such as "decode"; "unknown" if unset, "role 7" if this version lacks it."""
    return _enum_name(node_status_pb2.Role, "ROLE_", role)


def phase_name(phase: node_status_pb2.PeerPhase.ValueType) -> str:
    """The phase's name in logs, in the form of `role_name`."""
    return _enum_name(node_status_pb2.PeerPhase, "PEER_PHASE_", phase)


def _enum_name(enum: Any, prefix: str, number: int) -> str:
    if not number:
        return "unknown"
    name = enum.Name(number).removeprefix(prefix) if number in enum.values() else f"{prefix}{number}"
    return str(name).lower().replace("_", " ")


def sampling_to_proto(sampling: SamplingParams | ResolvedSampling) -> pb.SamplingParams:
    """The sampling parameters that are set, as a message.

    Raises:
        InvalidRequest: a text cannot be sent.
    """
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(sampling, name)) is not None}
    if sampling.grammar is not None:
        given["grammar"] = grammar_to_proto(sampling.grammar)
    try:
        return pb.SamplingParams(**given)
    except ValueError as error:
        raise InvalidRequest(f"a sampling parameter cannot be sent: {error}", field="sampling") from None


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """The sampling parameters that a client set.

    Raises:
        InvalidRequest: a value is not a number or is out of range; the error names it.
    """
    return SamplingParams(**_set_fields(message))


def resolved_sampling_from_proto(message: pb.SamplingParams) -> ResolvedSampling:
    """The sampling parameters that a gateway decided. Fields that it leaves out have their neutral defaults.

    Raises:
        InvalidRequest: a value is not a number or is out of range; the error names it.
    """
    return ResolvedSampling(**_set_fields(message))


def _set_fields(message: pb.SamplingParams) -> dict[str, Any]:
    # NOTE: message and dataclasses use the same field names; ListFields yields the fields that are set.
    given: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    for name in ("stop", "stop_token_ids"):
        if name in given:
            given[name] = tuple(given[name])
    if "logit_bias" in given:
        given["logit_bias"] = dict(message.logit_bias)
    if "grammar" in given:
        given["grammar"] = grammar_from_proto(message.grammar)
    return given


def grammar_to_proto(grammar: Grammar) -> pb.Grammar:
    """The grammar as a message. Raises InvalidRequest if the text of a choice is not a JSON array of texts."""
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return pb.Grammar(json_object=pb.JsonObject())
    if grammar.kind is GrammarKind.CHOICE:
        return pb.Grammar(choice=_choices_to_proto(grammar.text))
    # NOTE: the oneof's fields have the names of the kinds.
    constraint: dict[str, Any] = {grammar.kind.value: grammar.text}
    return pb.Grammar(**constraint)


def _choices_to_proto(text: str) -> pb.Choices:
    try:
        texts = json.loads(text)
        if not isinstance(texts, list):
            raise TypeError
        return pb.Choices(texts=texts)
    except (ValueError, TypeError, RecursionError):
        allowed = ("a JSON array of non-empty strings",)
        raise InvalidRequest(
            "the choice is not an array of texts", field="grammar", value=text, allowed=allowed
        ) from None


def grammar_from_proto(message: pb.Grammar) -> Grammar:
    """The grammar in a message. Raises InvalidRequest if it has no constraint, or one that this version lacks."""
    match message.WhichOneof("constraint"):
        case None:
            allowed = tuple(kind.value for kind in GrammarKind)
            cure = "set one of them; older clients sent `kind` and `text`, see CHANGELOG.md"
            raise InvalidRequest("the grammar has no constraint", field="grammar", allowed=allowed, cure=cure)
        case "json_object":
            return Grammar(GrammarKind.JSON_OBJECT)
        case "choice":
            return Grammar(GrammarKind.CHOICE, json.dumps(list(message.choice.texts), ensure_ascii=False))
        case kind:
            return Grammar(GrammarKind(kind), getattr(message, kind))


def token_to_proto(token: TokenOutput) -> pb.Token:
    message = pb.Token(token_id=token.token_id, index=token.index)
    set_logprobs(message, token)
    return message


def set_logprobs(message: pb.Token, token: TokenOutput) -> None:
    """Adds the token's logprobs to a message without any, if it has them."""
    if token.logprob is not None:
        message.logprob = token.logprob
    for token_id, value in token.top_logprobs:
        message.top_logprobs.add(token_id=token_id, logprob=value)


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
    """The reason as a message's number. None, for an unfinished output, becomes FINISH_REASON_UNSPECIFIED."""
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_REASONS[reason]


def finish_reason_from_proto(number: pb.FinishReason.ValueType) -> FinishReason | None:
    return _FINISH_REASONS_BACK.get(number)


def slo_from_proto(message: pb.Slo) -> Slo:
    """The bounds in a message. Raises InvalidRequest if one is not above 0."""
    return Slo(
        message.ttft_s if message.HasField("ttft_s") else None,
        message.tpot_s if message.HasField("tpot_s") else None,
    )


def adapter_to_proto(adapter: AdapterRef) -> node_status_pb2.Adapter:
    return node_status_pb2.Adapter(name=adapter.name, revision=adapter.revision)


def adapter_from_proto(message: node_status_pb2.Adapter) -> AdapterRef | None:
    """The adapter in a message. Returns None if the message is empty, which means the base model."""
    return AdapterRef(message.name, message.revision) if message.name else None


def adapters_from_proto(messages: Iterable[node_status_pb2.Adapter]) -> list[AdapterRef]:
    """The adapters in a list of messages, without empty ones."""
    return [adapter for message in messages if (adapter := adapter_from_proto(message)) is not None]


def usage_to_proto(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


def usage_from_proto(message: pb.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens,
        reasoning_tokens=message.reasoning_tokens,
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
        ttft_s=receipt.ttft_s,
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
        decode_cached_tokens=receipt.decode_cached_tokens,
        prefill_loaded_tokens=receipt.prefill_loaded_tokens,
        decode_loaded_tokens=receipt.decode_loaded_tokens,
        prefill_loaded=loaded_to_proto(receipt.prefill_loaded),
        decode_loaded=loaded_to_proto(receipt.decode_loaded),
        drafted_tokens=receipt.drafted_tokens,
        accepted_tokens=receipt.accepted_tokens,
        request_id=receipt.request_id,
    )


def loaded_to_proto(loaded: LoadedTokens) -> pb.LoadedTokens:
    return pb.LoadedTokens(host=loaded.host, file=loaded.file, store=loaded.store, peer=loaded.peer)


def loaded_from_proto(message: pb.LoadedTokens) -> LoadedTokens:
    return LoadedTokens(message.host, message.file, message.store, message.peer)


def receipt_from_proto(message: pb.Receipt) -> Receipt:
    """The receipt in a message. Raises PeerRefused if this version does not know its path."""
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
        ttft_s=message.ttft_s,
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
        decode_cached_tokens=message.decode_cached_tokens,
        prefill_loaded_tokens=message.prefill_loaded_tokens,
        decode_loaded_tokens=message.decode_loaded_tokens,
        prefill_loaded=loaded_from_proto(message.prefill_loaded),
        decode_loaded=loaded_from_proto(message.decode_loaded),
        drafted_tokens=message.drafted_tokens,
        accepted_tokens=message.accepted_tokens,
        request_id=message.request_id,
    )
