"""Finds out how to ask a server: its model and limits, which optional fields it takes, how many tokens words make.

A few requests of two tokens each, before the load.
"""

import asyncio
import json
from dataclasses import replace
from typing import Any

from baton.client.client import AsyncClient
from baton.core.errors import NoNode, UnknownModel
from baton.load.answer import AskError, LoadAnswer
from baton.load.http_stream import HttpStreams
from baton.load.openai_asker import Dialect, OpenAiAsker
from baton.load.prompts import WORDS, Contents, PromptMaker
from baton.load.target import Api, Server, Target
from baton.load.workload import PlannedRequest

_TIMEOUT_S = 120.0
# Ids of words in every vocabulary of a language model that we know: above the bytes, below special tokens.
_VOCABULARY = Contents().vocabulary
_SHORT_WORDS, _LONG_WORDS = 64, 512  # of the two texts that are counted

_NO_IGNORE_EOS = "the server does not take ignore_eos: outputs may be shorter than asked for"
_NO_COUNTS = "the server does not say how many tokens a message has: each message counts as one token between tokens"
_NO_USAGE = "the server reports no usage: tokens are messages, and prompts have one token per word"


async def probe(target: Target) -> Server:
    """Probes a target, and describes the server.

    Raises:
        BatonError: it cannot be reached, or answers no request.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await (_probe_grpc(target) if target.api is Api.GRPC else _probe_http(target))
    except TimeoutError:
        raise NoNode(f"{target.address} did not answer in {_TIMEOUT_S:.0f} s", field="target") from None


async def _probe_grpc(target: Target) -> Server:
    async with AsyncClient(target.addresses[0], api_key=target.api_key or None) as client:
        models = await client.list_models()
    if not models:
        raise NoNode(f"{target.address} serves no model yet", field="target", cure="wait until its nodes are ready")
    card = next((card for card in models if target.model in ("", card.name)), None)
    if card is None:
        names = tuple(card.name for card in models)
        raise UnknownModel(f"model {target.model!r} is not served", field="model", value=target.model, allowed=names)
    # The last ids of a vocabulary are special tokens.
    low = min(_VOCABULARY[0], card.vocab_size // 4)
    contents = Contents(vocabulary=(low, max(low + 1, card.vocab_size * 9 // 10)))
    return Server(target, card.name, contents, tokens_max=card.max_context_tokens or None)


async def _probe_http(target: Target) -> Server:
    streams = target.streams()
    try:
        model, tokens_max = await _model(target, streams)
        asker = OpenAiAsker(streams, PromptMaker(Contents()), model, target.api is Api.CHAT)
        await _find_dialect(target, asker)
        contents, notes = await _find_contents(asker)
    finally:
        await streams.close()
    if not asker.dialect.ignore_eos:
        notes.append(_NO_IGNORE_EOS)
    return Server(target, model, contents, asker.dialect, tokens_max, tuple(notes))


async def _model(target: Target, streams: HttpStreams) -> tuple[str, int | None]:
    """The model's name, and its longest context if the server reports it as vLLM does."""
    body = bytearray()
    request = streams.request("GET", "/v1/models")
    try:
        status = await streams.send(request, lambda part, _status: body.extend(part))
    except AskError as error:
        cure = "start a server there, or give the address of one that runs"
        raise NoNode(error.detail, field="target", value=target.address, cure=cure) from None
    try:
        cards: list[dict[str, Any]] = json.loads(body)["data"] if status == 200 else []
    except (ValueError, KeyError, TypeError):
        cards = []
    card = next((card for card in cards if target.model in ("", card.get("id"))), {})
    name = target.model or card.get("id")
    if not name:
        raise NoNode(
            f"{target.address} answers /v1/models with status {status} and no model", field="model",
            cure="give its name with --model",
        )  # fmt: skip
    return str(name), card.get("max_model_len")


async def _find_dialect(target: Target, asker: OpenAiAsker) -> None:
    """Tries all optional fields, then fewer, until the server accepts the request.

    Raises:
        NoNode: it accepts none.
    """
    words = " ".join(WORDS[:8])
    every = Dialect()
    tried = [every, replace(every, running_usage=False), replace(every, running_usage=False, ignore_eos=False)]
    tried.append(replace(tried[-1], usage=False))
    ways = [replace(each, token_ids=False) for each in tried] if asker.chat else []
    ways = ways or [replace(each, token_ids=ids) for ids in (True, False) for each in tried]
    error = AskError("", "")
    for asker.dialect in ways:
        prompt = list(range(_VOCABULARY[0], _VOCABULARY[0] + 8)) if asker.dialect.token_ids else words
        try:
            await asker.ask(asker.request(prompt, 2), LoadAnswer())
        except AskError as failed:
            error = failed
            # Others, such as overload or a wrong key, do not depend on the request's fields.
            if not error.kind.startswith(("400", "422")):
                break
        else:
            return
    raise NoNode(f"{target.address} answers no request: {error}", field="target", value=target.address)


async def _find_contents(asker: OpenAiAsker) -> tuple[Contents, list[str]]:
    answer = LoadAnswer()
    if asker.dialect.token_ids:
        prompt = list(range(_VOCABULARY[0], _VOCABULARY[0] + 8))
        await _asked(asker, prompt, answer)
        return Contents(), [] if answer.exact else [_NO_COUNTS]
    found = []
    for count in (_SHORT_WORDS, _LONG_WORDS):
        answer = LoadAnswer()
        text = asker.prompts.text(PlannedRequest(0, 0.0, count, 1))
        await _asked(asker, text, answer)
        found.append(answer.usage.get("prompt", 0))
    notes = [] if answer.exact else [_NO_COUNTS]
    short, long = found
    if long <= short:
        return Contents(), [*notes, _NO_USAGE]
    per_word = (long - short) / (_LONG_WORDS - _SHORT_WORDS)
    return Contents(tokens_per_word=per_word, extra_tokens=round(short - per_word * _SHORT_WORDS)), notes


async def _asked(asker: OpenAiAsker, prompt: Any, answer: LoadAnswer) -> None:
    try:
        await asker.ask(asker.request(prompt, 2), answer)
    except AskError as error:
        raise NoNode(f"the server answered the probe once, and then {error}", field="target") from None
