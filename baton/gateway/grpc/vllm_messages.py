"""Translates vLLM's engine messages to Baton's and back. Pure.

vLLM gives absent numbers its own defaults, not the model's, so every number is set here. Its messages carry 32-bit
floats, which are read in their shortest decimal form, so that a number has the same effect as in the other APIs.
"""

import json
from collections.abc import Sequence
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from baton.core.errors import InvalidRequest
from baton.core.sampling import SAMPLING_FIELDS, SamplingParams
from baton.core.sampling_field import Door, Kind, SamplingField
from baton.core.types import Grammar, GrammarKind
from baton.gateway.serving.validate import check_lengths
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.convert import finish_reason_from_proto, sampling_to_proto

_NAMES = {each.name_at(Door.VLLM): each for each in SAMPLING_FIELDS.values() if Door.VLLM in each.doors}
_REFUSED_FIELDS = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs")


def to_generate(request: vllm.GenerateRequest, prompt: Sequence[int], max_context_tokens: int) -> pb.GenerateRequest:
    """Translates a request; `prompt` holds its token ids.

    Raises:
        InvalidRequest: the request uses a field that Baton does not support, or a wrong value; the error names it.
    """
    _check_fields(request)
    params = request.sampling_params
    check_lengths(params, _NAMES)
    message = pb.GenerateRequest(request_id=request.request_id, token_ids=pb.TokenIds(ids=prompt), n=params.n)
    kept = len(prompt)
    if params.HasField("truncate_prompt_tokens"):
        message.truncate_prompt_tokens = _truncation(params.truncate_prompt_tokens, max_context_tokens)
        kept = min(kept, message.truncate_prompt_tokens)
    message.sampling.CopyFrom(_sampling(params, room=max(1, max_context_tokens - kept)))
    return message


def _check_fields(request: vllm.GenerateRequest) -> None:
    given = [name for name in _REFUSED_FIELDS if request.HasField(name)]
    given += ["extra_mm_inputs"] if request.extra_mm_inputs else []
    if given:
        cure = "send text or token ids only; Baton's nodes exchange KV themselves"
        raise InvalidRequest(f"{given[0]} is not supported", field=given[0], cure=cure)
    if request.data_parallel_rank:
        raise InvalidRequest(
            f"data_parallel_rank is {request.data_parallel_rank}",
            field="data_parallel_rank",
            value=request.data_parallel_rank,
            allowed=("0",),
            cure="leave it out: the gateway chooses the nodes",
        )


def _truncation(given: int, max_context_tokens: int) -> int:
    if given == -1:
        return max_context_tokens - 1
    if given < 1:
        allowed = ("-1 (the model's limit)", "1 or more")
        raise InvalidRequest(
            f"truncate_prompt_tokens is {given}", field="truncate_prompt_tokens", value=given, allowed=allowed
        )
    return given


def _sampling(params: vllm.SamplingParams, *, room: int) -> common_pb2.SamplingParams:
    given = {
        field.name: _value(params, name, field) for name, field in _NAMES.items() if Door.VLLM not in field.by_hand
    }
    if not params.HasField("max_tokens"):
        given["max_tokens"] = room
    return sampling_to_proto(SamplingParams(**given, grammar=_grammar(params)))


def _value(params: vllm.SamplingParams, name: str, field: SamplingField) -> Any:
    """Returns one parameter in Baton's form, or None if it is unset."""
    value = getattr(params, name)
    match field.kind:
        case Kind.TEXTS | Kind.TOKENS:
            return tuple(value)
        case Kind.BIASES:
            return {token_id: _number(bias) for token_id, bias in value.items()}
    if params.DESCRIPTOR.fields_by_name[name].has_presence:
        if not params.HasField(name) or (name == "seed" and value == -1):  # -1: vLLM draws one
            return field.default if field.kind is Kind.NUMBER else None
    elif not value and field.bounds is not None and not field.bounds.hold(value):
        return field.default  # for example, a top_p of 0 means that it is absent
    return _number(value) if field.kind is Kind.NUMBER else value


def _grammar(params: vllm.SamplingParams) -> Grammar | None:
    match params.WhichOneof("constraint"):
        case "json_schema":
            return Grammar(GrammarKind.JSON_SCHEMA, params.json_schema)
        case "regex":
            return Grammar(GrammarKind.REGEX, params.regex)
        case "grammar":
            # vLLM takes both languages here. Only GBNF defines its rules with "::=".
            return Grammar(GrammarKind.GBNF if "::=" in params.grammar else GrammarKind.LARK, params.grammar)
        case "structural_tag":
            return Grammar(GrammarKind.STRUCTURAL_TAG, params.structural_tag)
        case "choice":
            return Grammar(GrammarKind.CHOICE, json.dumps(list(params.choice.choices), ensure_ascii=False))
        case "json_object" if params.json_object:
            return Grammar(GrammarKind.JSON_OBJECT)
    return None


def _number(value: float) -> float:
    """Returns the shortest decimal number whose nearest 32-bit float is this one."""
    return float(f"{value:.7g}")


def to_chunk(
    message: pb.GenerateResponse, *, prompt_tokens: int, cached_tokens: int, sampling: vllm.SamplingParams
) -> vllm.GenerateResponse:
    """Translates a message with tokens. As in vLLM, the counts are those of this message."""
    chunk = vllm.GenerateStreamChunk(
        token_ids=[token.token_id for token in message.tokens],
        prompt_tokens=prompt_tokens,
        completion_tokens=len(message.tokens),
        cached_tokens=cached_tokens,
        output_logprobs=_output_logprobs(message.tokens, sampling),
        input_logprobs=_input_logprobs(message.prompt_logprobs, sampling),
        index=message.index,
    )
    return vllm.GenerateResponse(chunk=chunk)


def to_complete(
    output: pb.Output,
    prompt_logprobs: Sequence[common_pb2.PromptLogprob],
    *,
    prompt_tokens: int,
    cached_tokens: int,
    sampling: vllm.SamplingParams,
    last_token_id: int | None,
) -> vllm.GenerateResponse:
    """Builds the end of one output.

    Args:
        last_token_id: the output's last token; distinguishes a stop token from a stop string with the same digits.
    """
    complete = vllm.GenerateComplete(
        output_ids=[token.token_id for token in output.tokens],
        finish_reason=finish_reason_from_proto(output.finish_reason),
        prompt_tokens=prompt_tokens,
        completion_tokens=len(output.tokens),
        cached_tokens=cached_tokens,
        output_logprobs=_output_logprobs(output.tokens, sampling),
        input_logprobs=_input_logprobs(prompt_logprobs, sampling),
        index=output.index,
    )
    if (
        last_token_id in sampling.stop_token_ids
        and last_token_id is not None
        and output.stop_reason == str(last_token_id)
    ):
        complete.matched_token_id = last_token_id
    elif output.stop_reason:
        complete.matched_stop_str = output.stop_reason
    return vllm.GenerateResponse(complete=complete)


def _output_logprobs(tokens: Sequence[common_pb2.Token], sampling: vllm.SamplingParams) -> vllm.OutputLogProbs | None:
    if not (tokens and sampling.HasField("logprobs")):
        return None
    logprobs = vllm.OutputLogProbs(
        token_logprobs=[token.logprob for token in tokens], token_ids=[token.token_id for token in tokens]
    )
    if sampling.logprobs:
        logprobs.top_logprobs.extend(_top(token.top_logprobs) for token in tokens)
    return logprobs


def _input_logprobs(
    prompt: Sequence[common_pb2.PromptLogprob], sampling: vllm.SamplingParams
) -> vllm.InputLogProbs | None:
    if not prompt:
        return None
    logprobs = vllm.InputLogProbs(token_ids=[token.token_id for token in prompt])
    for token in prompt:
        logprobs.token_logprobs.add(value=token.logprob if token.HasField("logprob") else None)
        if sampling.prompt_logprobs:
            logprobs.top_logprobs.append(_top(token.top_logprobs))
    return logprobs


def _top(tokens: Sequence[common_pb2.TokenLogprob]) -> vllm.TopLogProbs:
    return vllm.TopLogProbs(values=[token.logprob for token in tokens], token_ids=[token.token_id for token in tokens])
