"""The picker reads from a body which gateway its request should go to."""

import json
from typing import Any

import orjson
import pytest

from baton.gateway.picker.prompt import LOOK_BYTES, look

SYSTEM = {"role": "system", "content": "Answer briefly."}
FIRST = {"role": "user", "content": "Where is the source of the Nile?"}
ANSWER = {"role": "assistant", "content": "In several places."}
SECOND = {"role": "user", "content": "And the mouth?"}


def key(body: dict[str, Any]) -> bytes | None:
    return look(orjson.dumps(body), whole=True).key


@pytest.mark.parametrize("name", ["messages", "input"])
def test_all_turns_of_a_conversation_have_one_key(name: str) -> None:
    turns = [[SYSTEM, FIRST], [SYSTEM, FIRST, ANSWER, SECOND]]
    assert len({key({"model": "m", name: each, "max_tokens": len(each)}) for each in turns}) == 1
    assert key({name: [SYSTEM, SECOND]}) != key({name: [SYSTEM, FIRST]})
    assert key({"system": "other", name: [FIRST]}) != key({"system": "one", name: [FIRST]})


def test_a_prompt_that_grows_keeps_its_key() -> None:
    text = "word " * 300
    assert key({"prompt": text}) == key({"prompt": text + "more"}) != key({"prompt": "other"})
    ids = list(range(2000))
    assert key({"prompt": ids}) == key({"prompt": [*ids, 7]}) != key({"prompt": [8, 9]})


def test_a_session_is_a_key_from_the_header_or_the_body() -> None:
    first = key({"messages": [FIRST], "baton": {"session_id": "s"}})
    assert first == key({"messages": [SECOND], "baton": {"session_id": "s"}})
    assert first == look(b"", whole=False, session="s").key


@pytest.mark.parametrize(
    "body", [b"", b"{", b"null", b"[1]", b'{"messages": 3}', b'{"prompt": []}', b"\xff\x00", b"[" * 9000, b"{}"]
)
def test_a_body_that_shows_nothing_has_no_key(body: bytes) -> None:
    assert look(body, whole=True).key is None


def test_a_long_body_has_the_key_of_its_texts_beginning() -> None:
    texts = [orjson.dumps({"model": name, "messages": [FIRST] * 9000}) for name in ("a", "b")]
    keys = {look(text[:LOOK_BYTES], whole=False).key for text in texts}
    assert len(keys) == 1
    assert None not in keys
    assert keys == {look(texts[0], whole=True).key}


@pytest.mark.parametrize("limit", [{"max_tokens": 16}, {"max_completion_tokens": 16, "max_tokens": 900}])
def test_a_request_counts_its_text_and_its_output(limit: dict[str, Any]) -> None:
    body = orjson.dumps({"prompt": "x" * 4000, **limit})
    assert look(body, whole=True).tokens == len(body) // 4 + 16
    assert look(b"", whole=False, length=4000).tokens > 1000


@pytest.mark.parametrize("limit", [-5, 0, 1 << 70, "many", 1.5, None, True])
def test_a_strange_limit_is_bounded(limit: object) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": limit}).encode()
    assert 0 < look(body, whole=True).tokens <= 5000


def test_a_claimed_length_is_bounded() -> None:
    assert look(b"", whole=False, length=10**15).tokens == 1 << 20
