"""The handlers of OpenAI's chat completions and completions."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import orjson
from starlette.responses import Response

from baton.core.errors import InvalidRequest
from baton.gateway.http.bodies import ChatBody, CompletionBody, GenerationBody
from baton.gateway.http.call import HttpCall
from baton.gateway.http.checking import checked
from baton.gateway.http.chunks import (
    ChatChunks,
    CompletionChunks,
    StreamShape,
    add_usage,
    finish_name,
    receipt_json,
    stop_reason_json,
    usage_json,
)
from baton.gateway.http.client_fields import with_extra_body, without_effect
from baton.gateway.http.counting import encode_chat
from baton.gateway.http.custom_tools import custom_tools
from baton.gateway.http.event_stream import HttpJob
from baton.gateway.http.logprobs import CompletionLogprobs, LogprobWriter
from baton.gateway.http.tool_calls import whole_call
from baton.gateway.http.translate import chat_message, chat_request, completion_messages, grammar_of, lone_results
from baton.gateway.text.chat.types import ChatRequest
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb


async def chat_completions(call: HttpCall) -> Response:
    body, message, chat = await call.read_as(partial(_understand_chat, call.request_id))
    custom = custom_tools(body.tools, body.tool_choice)
    grammar_field = custom.grammar_field or grammar_of(body)[1]
    call.field_names = {"prompt": "messages", "text": "messages", "grammar": grammar_field}
    _warn(call, body)
    for text in (*custom.warnings, *lone_results(chat.messages)):
        call.warn(text)
    shape = _shape(call, body, "chat.completion.chunk", "chatcmpl-", wants_logprobs=body.logprobs)
    shape = replace(shape, custom_tools=custom)
    if body.stream:
        if body.continuous_usage:
            shape = replace(shape, prompt_tokens=await _count(call, message, chat))
        return call.stream(message, ChatChunks(shape), chat)
    whole = await call.collect(message, chat)
    answer = _answer(shape, "chat.completion", [_chat_choice(shape, output) for output in whole.outputs], whole)
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = _writer(call, body).prompt(whole.prompt_logprobs)
    return _json(answer)


async def completions(call: HttpCall) -> Response:
    limit = call.context.settings.max_concurrent_requests
    body, messages = await call.read_as(partial(_understand_completion, call.request_id, limit))
    call.field_names = {"text": "prompt", "grammar": grammar_of(body)[1]}
    _warn(call, body)
    shape = _shape(call, body, "text_completion", "cmpl-", wants_logprobs=body.logprobs is not None)
    echoes = tuple([await _echo(call, prompt) for prompt in body.prompts]) if body.echo else ()
    if body.stream:
        if body.continuous_usage:
            shape = replace(shape, prompt_tokens=sum([await _count(call, message) for message in messages]))
        encoder = CompletionChunks(shape, echoes=echoes, hides_tokens=body.max_tokens == 0)
        jobs = [HttpJob(message, encoder.for_prompt(number)) for number, message in enumerate(messages)]
        return call.stream_all(jobs, encoder)
    answers = await call.collect_all(messages)
    choices: list[dict[str, Any]] = []
    for number, whole in enumerate(answers):
        echo = echoes[number] if body.echo else ""
        echoed = whole.prompt_logprobs if body.echo else ()
        for output in whole.outputs:
            choices.append(_completion_choice(shape, body, len(choices), output, echo, echoed))
            if body.prompt_logprobs is not None:
                choices[-1]["prompt_logprobs"] = _writer(call, body).prompt(whole.prompt_logprobs)
    return _json(_answer(shape, "text_completion", choices, *answers))


def _understand_chat(request_id: str, value: Mapping[str, Any]) -> tuple[ChatBody, pb.GenerateRequest, ChatRequest]:
    body = checked(ChatBody, with_extra_body(value))
    return body, chat_message(body, request_id), chat_request(body)


def _understand_completion(
    request_id: str, limit: int, value: Mapping[str, Any]
) -> tuple[CompletionBody, list[pb.GenerateRequest]]:
    body = checked(CompletionBody, with_extra_body(value))
    count = len(body.prompts)
    if count > limit:
        raise InvalidRequest(f"prompt has {count} prompts", field="prompt", value=count, allowed=(f"up to {limit}",))
    return body, completion_messages(body, request_id)


def _warn(call: HttpCall, body: GenerationBody) -> None:
    for text in without_effect(body):
        call.warn(text)


def _shape(call: HttpCall, body: GenerationBody, name: str, prefix: str, *, wants_logprobs: bool) -> StreamShape:
    return StreamShape(
        object_name=name,
        id=call.new_answer_id(prefix, resumable=body.return_token_ids),
        created_s=int(time.time()),
        model=body.model or call.serving.model.name,
        request_id=call.request_id,
        logprobs=_writer(call, body) if wants_logprobs else None,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        receipt=call.wants_receipt or body.baton.receipt,
        token_ids=body.return_token_ids,
        reasoning=not isinstance(body, ChatBody) or body.shows_reasoning,
        outputs=body.n,
        tokens_before=len(body.baton.output_token_ids),
    )


def _writer(call: HttpCall, body: GenerationBody) -> LogprobWriter:
    return LogprobWriter(
        call.serving.model.tokenizer,
        as_ids=body.return_tokens_as_token_ids,
        skip_special_tokens=body.skip_special_tokens,
    )


async def _count(call: HttpCall, message: pb.GenerateRequest, chat: ChatRequest | None = None) -> int:
    """Counts prompt tokens. This tokenizes the prompt a second time, for streams with the usage in every chunk."""
    special = not message.HasField("add_special_tokens") or message.add_special_tokens
    if chat is not None:
        tokens = await encode_chat(call.serving, chat)
    elif message.HasField("text"):
        tokens = await call.serving.encode(message.text, add_special_tokens=special)
    else:
        tokens = list(message.token_ids.ids)
    return min(len(tokens), message.truncate_prompt_tokens or len(tokens))


async def _echo(call: HttpCall, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    call.serving.model.check_token_ids("prompt", prompt)
    return await call.serving.decode(prompt)


def _chat_choice(shape: StreamShape, output: pb.Output) -> dict[str, Any]:
    chat = output.chat
    answer: dict[str, Any] = {"role": "assistant", "content": chat.content, "refusal": None}
    if chat.reasoning and shape.reasoning:
        answer["reasoning_content"] = chat.reasoning
    finish = finish_name(output.finish_reason)
    if chat.tool_calls:
        answer["content"] = chat.content or None
        answer["tool_calls"] = [whole_call(call, shape.custom_tools) for call in chat.tool_calls]
        finish = "tool_calls" if finish == "stop" else finish
    logprobs = shape.logprobs.chat(output.tokens) if shape.logprobs is not None else None
    return {
        "index": output.index,
        "message": answer,
        "logprobs": logprobs,
        **_ending(shape, finish, output),
    }


def _completion_choice(
    shape: StreamShape,
    body: CompletionBody,
    index: int,
    output: pb.Output,
    echo: str,
    echoed: Sequence[common_pb2.PromptLogprob],
) -> dict[str, Any]:
    """Returns a choice. `echo` is the prompt's text to begin with, and `echoed` has the logprobs of its tokens."""
    hidden = body.max_tokens == 0
    tokens: list[common_pb2.Token | common_pb2.PromptLogprob] = [*echoed, *(() if hidden else output.tokens)]
    logprobs = None
    if shape.logprobs is not None:
        logprobs = CompletionLogprobs(shape.logprobs, with_prompt=body.echo).write(tokens)
    return {
        "index": index,
        "text": echo + ("" if hidden else output.text),
        "logprobs": logprobs,
        **_ending(shape, finish_name(output.finish_reason), output),
    }


def _ending(shape: StreamShape, finish: str, output: pb.Output) -> dict[str, Any]:
    ending: dict[str, Any] = {"finish_reason": finish, "stop_reason": stop_reason_json(output.stop_reason)}
    if shape.token_ids:
        ending["token_ids"] = [token.token_id for token in output.tokens]
    return ending


def _answer(
    shape: StreamShape, name: str, choices: list[dict[str, Any]], *answers: pb.CompleteResponse
) -> dict[str, Any]:
    usage = common_pb2.Usage()
    for whole in answers:
        add_usage(usage, whole.usage)
    answer: dict[str, Any] = {
        "id": shape.id,
        "object": name,
        "created": shape.created_s,
        "model": shape.model,
        "choices": choices,
        "usage": usage_json(usage),
    }
    revisions = {output.revision for whole in answers for output in whole.outputs}
    if len(revisions) == 1 and "" not in revisions:
        answer["system_fingerprint"] = revisions.pop()
    if shape.receipt:
        receipts = [receipt_json(output.receipt) for whole in answers for output in whole.outputs]
        answer["baton"] = {"receipt": receipts[0]} if len(receipts) == 1 else {"receipts": receipts}
    return answer


def _json(answer: dict[str, Any]) -> Response:
    return Response(orjson.dumps(answer), media_type="application/json")
