"""Whatever a client sends, its request is translated, or refused with a typed error: no other exception comes out."""

import contextlib

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from baton.core.errors import InvalidRequest
from baton.gateway.http.bodies import ChatBody, CompletionBody, TokenizeBody
from baton.gateway.http.body_reader import parse
from baton.gateway.http.translate import chat_message, chat_request, completion_messages
from baton.gateway.serving.validate import check_sampling
from baton.gateway.text.chat.json_request import chat_request as conversation
from baton.gateway.text.model import ServedModel, read_served_model
from baton.settings.config import DEMO_MODELS

LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "tool", "text", "function", "f", "auto", "", "{", "json_object"])
)  # fmt: skip
KEYS = st.sampled_from(
    ["role", "content", "type", "text", "function", "name", "parameters", "tool_calls", "id", "arguments", "properties",
     "json_schema", "schema", "regex", "1", "-1", "tool_call_id"]
)  # fmt: skip
ANY = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
FUNCTION = st.fixed_dictionaries({"name": ANY}, optional={"parameters": ANY})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "robot"])},
    optional={"content": ANY, "tool_calls": ANY, "tool_call_id": ANY, "name": ANY, "reasoning_content": ANY},
)
TOOLS = st.lists(st.fixed_dictionaries({"type": st.just("function")}, optional={"function": FUNCTION}), max_size=2)


def changed(valid: dict[str, object], model: type[BaseModel]) -> st.SearchStrategy[dict[str, object]]:
    """The valid body with some fields of any value."""
    wrong = st.dictionaries(st.sampled_from(sorted(model.model_fields)), ANY, max_size=3)
    return wrong.map(lambda fields: {**valid, **fields})


def body_of(value: object) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)


@pytest.fixture(scope="module")
def served() -> ServedModel:
    return read_served_model(DEMO_MODELS / "llama", None)


@given(st.binary(max_size=40))
@example(b'{"prompt": "a"}')
def test_any_bytes_are_served_or_refused(data: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        completion_messages(parse(CompletionBody, data), "r")


def wide(value: object) -> bool:
    """Whether JSON can have all numbers of this value as we write it."""
    try:
        body_of(value)
    except (TypeError, orjson.JSONEncodeError):
        return False
    return True


@given(changed({"prompt": "a"}, CompletionBody).filter(wide))
@settings(max_examples=120, deadline=None)
def test_any_completion_is_served_or_refused(served: ServedModel, value: dict[str, object]) -> None:
    with contextlib.suppress(InvalidRequest):
        for message in completion_messages(parse(CompletionBody, body_of(value)), "r"):
            check_sampling(message.sampling, served)


@given(
    changed({"messages": [{"role": "user", "content": "hi"}]}, ChatBody).filter(wide),
    st.lists(MESSAGE, min_size=1, max_size=3).filter(wide),
    TOOLS.filter(wide),
)
@settings(max_examples=120, deadline=None)
def test_any_chat_is_served_or_refused(
    served: ServedModel, value: dict[str, object], messages: list[object], tools: list[object]
) -> None:
    for body in (value, {**value, "messages": messages}, {**value, "messages": messages, "tools": tools}):
        with contextlib.suppress(InvalidRequest):
            parsed = parse(ChatBody, body_of(body))
            check_sampling(chat_message(parsed, "r").sampling, served)
            request = chat_request(parsed)
            served.chat.parser(request, served.chat.prepare(request), "seed")


@given(changed({"messages": [{"role": "user", "content": "hi"}]}, TokenizeBody).filter(wide))
@settings(max_examples=100, deadline=None)
def test_any_body_of_tokenize_is_served_or_refused(served: ServedModel, value: dict[str, object]) -> None:
    with contextlib.suppress(InvalidRequest):
        body = parse(TokenizeBody, body_of(value))
        if body.messages is not None:
            served.chat.prepare(conversation(body.model_dump(exclude={"model", "prompt"})))
