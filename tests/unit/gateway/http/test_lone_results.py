"""Results of tools whose calls are missing from a chat."""

import json
from typing import Any

import pytest

from baton.gateway.http.translate import lone_results
from tests.unit.gateway.http.http_gateway import open_http_gateway

USER = {"role": "user", "content": "What is the weather?"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}


def called(*ids: str | None) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "weather", "arguments": "{}"}} for _ in ids]
    named = [call if id_ is None else {**call, "id": id_} for call, id_ in zip(calls, ids, strict=True)]
    return {"role": "assistant", "content": "", "tool_calls": named}


@pytest.mark.parametrize(
    ("messages", "lone"),
    [
        ([USER, called("call_1"), RESULT], None),
        ([USER, called("call_2", "call_1"), RESULT, USER], None),
        ([USER, called(None), RESULT], None),
        ([USER, called("call_1"), {"role": "tool", "content": "rain"}], None),
        ([USER, RESULT], 1),
        ([USER, {"role": "tool", "content": "rain"}], 1),
        ([USER, {"role": "assistant", "content": "ok", "tool_calls": None}, USER, RESULT], 3),
        ([USER, called("call_2"), RESULT], 2),
        ([USER, RESULT, called("call_1"), RESULT], 1),
    ],
)
def test_a_result_answers_a_call_before_it(messages: list[dict[str, Any]], lone: int | None) -> None:
    assert [warning.split(".")[0] for warning in lone_results(messages)] == [f"messages[{lone}]"][: lone is not None]


def test_finding_it_takes_few_steps_for_each_of_many_results() -> None:
    compared = 0

    class Id(str):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return super().__eq__(other)

        __hash__ = str.__hash__

    number = 500
    results = [{**RESULT, "tool_call_id": Id(f"call_{each}")} for each in range(number)]
    assert lone_results([called(*(f"call_{each}" for each in range(number))), *results]) == []
    assert compared < 10 * number


@pytest.mark.parametrize(("calls", "warnings"), [([called("call_1")], 0), ([], 1)])
async def test_a_chat_with_a_lone_result_is_served_with_a_warning(calls: list[dict[str, Any]], warnings: int) -> None:
    body = {"messages": [USER, *calls, RESULT], "max_tokens": 5}
    async with open_http_gateway() as door:
        wire = await door.connect()
        wire.send("POST", "/v1/chat/completions", json.dumps(body).encode(), connection="close")
        door.finish(0, key=await door.accept())
        head = await wire.head()
        assert head.status == 200
        assert len([name for name, _ in head.all_headers if name == "x-baton-warning"]) == warnings
        await wire.closed()
