"""Turns a client's message into a validated request: prompt tokens, sampling parameters, and the parser of a chat.

Slow work runs outside the event loop: tokenizing in a thread, chat templates and grammar checks in other processes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import orjson

from baton.core.errors import ContextOverflow
from baton.core.sampling import ResolvedSampling
from baton.core.token_ids import token_array
from baton.core.types import AdapterRef
from baton.gateway.core.prompt_blocks import PromptBlocks
from baton.gateway.core.request import Request, deadline_exceeded
from baton.gateway.serving.validate import (
    check_keep_time,
    check_output,
    check_prompt,
    check_prompt_given,
    check_prompt_length,
    check_revision,
    check_sampling,
    check_session_id,
    check_text,
    check_truncation,
    end_of,
    too_long_cure,
)
from baton.gateway.text.chat.json_request import chat_of_message
from baton.gateway.text.chat.types import ChatRequest, OutputParser, PreparedChat
from baton.gateway.text.model import ServedModel
from baton.gateway.text.text_work import TextWork
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.convert import slo_from_proto
from baton.security import identity

T = TypeVar("T")

# More characters than a token of ordinary text has on average. A text with more characters than a whole context of such
# tokens is first checked by its beginning.
CHARACTERS_PER_TOKEN = 12
_MESSAGES_COUNTED = 1000


@dataclass(frozen=True)
class RequestCall:
    """A client's call: its message and the data that are not in the message.

    Attributes:
        chat: used instead of the message's prompt if set.
        skip: gets the messages that the client already has when it continues a partial answer.
    """

    message: pb.GenerateRequest
    chat: ChatRequest | None
    request_id: str
    started_at_s: float
    timeout_s: float
    traceparent: str = ""
    skip: Callable[[pb.GenerateResponse], object] | None = None


@dataclass(frozen=True)
class Prepared:
    """A request that can be served. `parser` makes the parser of one output from a seed; None for a request without
    chat."""

    request: Request
    parser: Callable[[str], OutputParser] | None


@dataclass(frozen=True)
class _Prompt:
    token_ids: Sequence[int]
    sampling: ResolvedSampling
    parser: Callable[[str], OutputParser] | None = None


async def prepare(
    call: RequestCall,
    model: ServedModel,
    texts: TextWork,
    *,
    max_context_tokens: int,
    adapter: AdapterRef | None = None,
) -> Prepared:
    """Validates the message and tokenizes its prompt.

    Args:
        adapter: adapter that the message names as its model; None: the base model.

    Raises:
        InvalidRequest: the message is invalid.
        UnknownModel: the model's name is unknown.
        Overloaded: too many large texts wait already.
        DeadlineExceeded: the request's time is up.
    """
    message, chat = call.message, call.chat
    if adapter is None:
        model.check_name(message.model)
    revision, adapter = check_revision(message.revision, adapter)
    if chat is None:
        check_prompt_given(message)
    keep = check_truncation(message)
    prompt_message: pb.TokenIds | None = None
    is_chat = chat is not None or message.WhichOneof("prompt") == "chat"
    fills_context = is_chat and not message.sampling.HasField("max_tokens")
    sampling = check_sampling(message.sampling, model, max_tokens=max_context_tokens if fills_context else None)
    if not is_chat and message.WhichOneof("prompt") == "token_ids":
        ids = message.token_ids.ids
        kept = len(ids) if keep is None else min(keep, len(ids))
        check_prompt_length(kept, model, max_context_tokens=max_context_tokens)
        prompt_message = message.token_ids if kept == len(ids) else None
        last_ids = ids if keep is None else ids[-keep:]
        prompt = _Prompt(token_array(last_ids, field="prompt", vocab_size=model.vocab_size), sampling)
    elif is_chat:
        prompt = await _in_time(_prompt_of_chat(message, chat, sampling, model, texts, max_context_tokens), call)
    else:
        special = not message.HasField("add_special_tokens") or message.add_special_tokens
        encoding = _encode(message.text, message, model, texts, max_context_tokens, add_special_tokens=special)
        prompt = _Prompt(await _in_time(encoding, call), sampling)
    if prompt.sampling.grammar is not None:
        checking = model.grammars.check(prompt.sampling.grammar, client=identity.current().name)
        await _in_time(checking, call)
    token_ids = prompt.token_ids if keep is None else prompt.token_ids[-keep:]
    check_prompt(token_ids, model, max_context_tokens=max_context_tokens)
    sampling = prompt.sampling
    if fills_context:
        sampling = replace(sampling, max_tokens=max_context_tokens - len(token_ids))
    output = check_output(message, sampling, model, prompt_tokens=len(token_ids), max_tokens=max_context_tokens)
    max_output = min(sampling.max_tokens, max_context_tokens - len(token_ids))
    request = Request(
        request_id=call.request_id,
        prompt=token_ids,
        sampling=sampling,
        cache_salt=message.cache_salt,
        started_at_s=call.started_at_s,
        timeout_s=call.timeout_s,
        priority=message.priority,
        slo=slo_from_proto(message.slo),
        session_id=identity.current().session(check_session_id(message.session_id)),
        keep=check_keep_time(message, tenant=identity.current().tenant),
        output=output,
        revision=revision,
        ended=end_of(output, sampling, model, max_output=max_output),
        prompt_message=prompt_message,
        blocks=PromptBlocks(token_ids, cache_salt=message.cache_salt, adapter=adapter),
        traceparent=call.traceparent,
        adapter=adapter,
    )
    return Prepared(request, prompt.parser)


def fewest_tokens(message: pb.GenerateRequest, chat: ChatRequest | None) -> int:
    """Estimated minimum number of prompt tokens, before the prompt is tokenized."""
    if chat is None and message.WhichOneof("prompt") == "token_ids":
        return len(message.token_ids.ids)
    return _size(message, chat) // CHARACTERS_PER_TOKEN


async def _in_time(work: Awaitable[T], call: RequestCall) -> T:
    try:
        async with asyncio.timeout_at(call.started_at_s + call.timeout_s):
            return await work
    except TimeoutError:
        raise deadline_exceeded(call.timeout_s) from None


async def _prompt_of_chat(
    message: pb.GenerateRequest,
    chat: ChatRequest | None,
    sampling: ResolvedSampling,
    model: ServedModel,
    texts: TextWork,
    max_context_tokens: int,
) -> _Prompt:
    size_bytes = _size(message, chat)
    if chat is None:
        chat = await texts.run(size_bytes, partial(chat_of_message, message.chat, sampling.grammar))
    elif sampling.grammar is not None:
        chat = replace(chat, grammar=sampling.grammar)
    prepared = await render(chat, model, texts, size_bytes=size_bytes)
    ends = dict.fromkeys((*sampling.stop_token_ids, *prepared.stop_token_ids))
    sampling = replace(
        sampling,
        grammar=prepared.grammar,
        skip_special_tokens=sampling.skip_special_tokens and prepared.skip_special_tokens,
        stop_token_ids=sampling.stop_token_ids if sampling.ignore_eos else tuple(ends),
    )
    special = message.HasField("add_special_tokens") and message.add_special_tokens
    token_ids = await _encode(prepared.to_encode, message, model, texts, max_context_tokens, add_special_tokens=special)
    return _Prompt(token_ids, sampling, partial(model.chat.parser, chat, prepared))


async def render(chat: ChatRequest, model: ServedModel, texts: TextWork, *, size_bytes: int) -> PreparedChat:
    """Renders a conversation to its prompt, in another process.

    Args:
        size_bytes: approximate size of the conversation.

    Raises:
        InvalidRequest: the template refuses the conversation, or needs too much time or memory for it.
        Overloaded: too many large texts wait already, or no process can render now.
    """
    with texts.holding() as hold:
        hold(size_bytes)
        return await model.renderer.prepare(chat, size_bytes=size_bytes, client=identity.current().name)


async def _encode(
    text: str,
    message: pb.GenerateRequest,
    model: ServedModel,
    texts: TextWork,
    max_context_tokens: int,
    *,
    add_special_tokens: bool,
) -> list[int]:
    work = partial(
        encode,
        text,
        model,
        max_context_tokens=max_context_tokens,
        field="prompt",
        add_special_tokens=add_special_tokens,
        salt=message.cache_salt,
        truncated=message.HasField("truncate_prompt_tokens"),
    )
    return await texts.run(len(text), work)


# ---- in a thread


def encode(
    text: str,
    model: ServedModel,
    *,
    max_context_tokens: int,
    field: str,
    add_special_tokens: bool,
    salt: str = "",
    truncated: bool = False,
) -> list[int]:
    """Encodes the text. Texts far longer than a context are refused at little cost.

    Args:
        truncated: whether only the last tokens are used, so that a long text is allowed.

    Raises:
        InvalidRequest: the text is longer than any prompt.
    """
    check_text(text, model, max_context_tokens=max_context_tokens, field=field)
    if not truncated:
        _check_beginning(text, model, max_context_tokens=max_context_tokens, field=field, salt=salt)
    return model.tokenizer.encode(text, add_special_tokens=add_special_tokens, salt=salt)


def _check_beginning(text: str, model: ServedModel, *, max_context_tokens: int, field: str, salt: str) -> None:
    """Checks a long text by its beginning before all of it is tokenized.

    Raises:
        ContextOverflow: the beginning alone has far more tokens than a context.
    """
    stop = CHARACTERS_PER_TOKEN * max_context_tokens
    if len(text) <= stop:
        return
    num_tokens = len(model.tokenizer.encode(text[:stop], add_special_tokens=False, salt=salt))
    # Cutting a text changes some tokens at the cut, but never half of all tokens.
    if num_tokens > 2 * max_context_tokens:
        cure = too_long_cure(model, max_context_tokens=max_context_tokens)
        raise ContextOverflow.of(num_tokens // 2, max_context_tokens, field=field, cure=cure, at_least=True)


def _size(message: pb.GenerateRequest, chat: ChatRequest | None) -> int:
    """Approximate size of the prompt in bytes."""
    return message.ByteSize() if chat is None else size_of_chat(chat)


def size_of_chat(chat: ChatRequest) -> int:
    """Approximate size in bytes of a conversation that came as JSON."""
    contents = [each.get("content") for each in chat.messages[:_MESSAGES_COUNTED]]
    if len(chat.messages) <= _MESSAGES_COUNTED and all(isinstance(content, str) for content in contents):
        size_bytes = sum(map(len, contents))  # type: ignore[arg-type]
    else:
        size_bytes = len(orjson.dumps(chat.messages))
    return size_bytes + len(orjson.dumps([chat.tools, chat.template_kwargs]))
