"""OpenAI's own client, unpatched, uses /v1/responses."""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseFunctionToolCall
from pydantic import BaseModel

from tests.integration.chatting import chat_gateway
from tests.integration.cluster import LLAMA, machines

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
PROMPT = "Return the name of the"


# A patch as Codex wants it, in the syntax of OpenAI's grammars.
PATCH_GRAMMAR = """start: opening change closing
opening: "*** Begin Patch" LF
closing: "*** End Patch" LF?
change: "*** Add File: " path LF line+
path: /[a-z]{1,9}/
line: "+" /[a-z ]{0,9}/ LF -> added

%import common.LF
"""


def custom(name: str, syntax: str, definition: str) -> Any:
    return {
        "type": "custom",
        "name": name,
        "format": {"type": "grammar", "syntax": syntax, "definition": definition},
    }


class Verdict(BaseModel):
    valid: bool
    grade: Literal["good", "bad"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    with (
        chat_gateway(tmp_path_factory.mktemp("chat")) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as connected,
    ):
        yield connected


def test_a_response_has_text_and_usage(client: OpenAI) -> None:
    answer = client.responses.create(model="llama", input=PROMPT, max_output_tokens=8, temperature=0)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text
    assert answer.usage is not None
    assert answer.usage.output_tokens == 8
    again = client.responses.create(
        model="llama", instructions=PROMPT.split(" the")[0], input="the name of the", max_output_tokens=8, temperature=0
    )
    assert again.output_text


def test_the_stream_says_what_the_whole_answer_says(client: OpenAI) -> None:
    whole = client.responses.create(model="llama", input=PROMPT, max_output_tokens=12, temperature=0)
    deltas, last = "", None
    for number, event in enumerate(
        client.responses.create(model="llama", input=PROMPT, max_output_tokens=12, temperature=0, stream=True)
    ):
        assert event.sequence_number == number
        if event.type == "response.output_text.delta":
            deltas += event.delta
        last = event
    assert last is not None
    assert last.type == "response.incomplete"
    assert deltas == last.response.output_text == whole.output_text


def test_the_stream_helper_reads_every_event(client: OpenAI) -> None:
    with client.responses.stream(
        model="llama", input=PROMPT, temperature=0, extra_body={"stop": ["."]}, max_output_tokens=200
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.status == "completed"
    assert final.output_text == text
    assert "." not in text


def test_logprobs_come_with_the_text(client: OpenAI) -> None:
    answer = client.responses.create(
        model="llama", input=PROMPT, max_output_tokens=5, temperature=0, top_logprobs=2,
        include=["message.output_text.logprobs"],
    )  # fmt: skip
    message = answer.output[0]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert len(part.logprobs) == 5
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == part.text
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in part.logprobs)
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def call_of(answer: Response) -> ResponseFunctionToolCall:
    (call,) = (item for item in answer.output if item.type == "function_call")
    return call


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_tool_is_called_and_its_output_sent_back(client: OpenAI, choice: Any) -> None:
    asked: Any = [{"role": "user", "content": "How is the weather?"}]
    answer = client.responses.create(
        model="llama", input=asked, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False,
        max_output_tokens=200, temperature=0,
    )  # fmt: skip
    call = call_of(answer)
    assert call.name == "weather"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    assert answer.status == "completed"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    turns: Any = [*asked, *answer.output, result]
    next_turn = client.responses.create(model="llama", input=turns, tools=[WEATHER], max_output_tokens=4, temperature=0)
    assert next_turn.output_text


def test_a_call_streams_its_arguments(client: OpenAI) -> None:
    with client.responses.stream(
        model="llama", input="How is the weather?", tools=[WEATHER], tool_choice="required",
        parallel_tool_calls=False, max_output_tokens=200, temperature=0,
    ) as stream:  # fmt: skip
        pieces = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        final = stream.get_final_response()
    call = call_of(final)
    assert call.arguments == pieces
    assert json.loads(pieces)["city"] in ("Rome", "Oslo")


def test_a_parsed_answer_obeys_its_schema(client: OpenAI) -> None:
    answer = client.responses.parse(
        model="llama", input="Is it valid?", text_format=Verdict, max_output_tokens=200, temperature=0
    )
    assert answer.status == "completed"
    assert isinstance(answer.output_parsed, Verdict)


def test_reasoning_is_an_item_of_its_own(client: OpenAI) -> None:
    kinds = []
    reasoned = ""
    for event in client.responses.create(
        model="llama", input=PROMPT, reasoning={"effort": "high"}, max_output_tokens=6, temperature=0, stream=True
    ):
        kinds.append(event.type)
        if event.type == "response.reasoning_text.delta":
            reasoned += event.delta
        elif event.type == "response.incomplete":
            (item,) = event.response.output
            assert item.type == "reasoning"
            assert item.content is not None
            assert item.content[0].text == reasoned
            usage = event.response.usage
            assert usage is not None
            assert usage.output_tokens_details.reasoning_tokens == usage.output_tokens == 6
    assert kinds[-1] == "response.incomplete"
    assert "response.output_text.delta" not in kinds


def test_reasoning_tokens_of_a_chat_completion_are_counted(client: OpenAI) -> None:
    request: Any = {"model": "llama", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6}
    request |= {"temperature": 0, "reasoning_effort": "high"}
    whole = client.chat.completions.create(**request)
    *_, last = client.chat.completions.create(**request, n=2, stream=True, stream_options={"include_usage": True})
    for usage, tokens in ((whole.usage, 6), (last.usage, 12)):
        assert usage.completion_tokens_details.reasoning_tokens == usage.completion_tokens == tokens


def test_a_conversation_that_is_too_long_loses_its_oldest_turns_on_request(client: OpenAI) -> None:
    turns: Any = [{"role": "user", "content": text} for text in (f"{PROMPT} object. " * 2000, "So what?")]
    request: Any = {"model": "llama", "instructions": "Be brief.", "input": turns, "max_output_tokens": 4}
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**request)
    assert raised.value.param == "input"
    answer = client.responses.create(**request, truncation="auto")
    assert answer.truncation == "auto"
    assert answer.output_text


def test_what_is_not_there_is_refused_with_the_cure(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model="llama", input=PROMPT, previous_response_id="resp_1")
    assert raised.value.param == "previous_response_id"
    assert "send the whole conversation" in raised.value.message
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model="llama", input=PROMPT, background=True)
    assert raised.value.param == "background"
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model="llama", input=PROMPT, max_output_tokens=2**40)
    assert raised.value.param == "max_output_tokens"
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="gpt", input=PROMPT)
    assert missing.value.param == "model"


def test_errors_of_the_gateway_name_this_apis_fields(client: OpenAI) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"not": {}}}}
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(
            model="llama", input=PROMPT, text={"format": {"type": "json_schema", "name": "x", "schema": schema}}
        )
    assert raised.value.param == "text.format.schema"
    assert "not" in raised.value.message


def test_a_stream_whose_prompt_is_too_long_raises_the_code(client: OpenAI) -> None:
    with pytest.raises(openai.APIError) as raised:
        list(client.responses.create(model="llama", input="word " * 100_000, stream=True))
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "input")


def test_the_request_id_comes_back(client: OpenAI) -> None:
    answer = client.responses.create(
        model="llama", input=PROMPT, max_output_tokens=1, extra_headers={"x-request-id": "mine-1"}
    )
    assert answer._request_id == "mine-1"
    assert re.fullmatch("resp_[0-9a-f]{32}", answer.id)


def test_a_forced_custom_tool_gets_an_input_of_its_grammar(client: OpenAI) -> None:
    tool = custom("patch", "lark", PATCH_GRAMMAR)
    with client.responses.stream(
        model="llama", input="Add a file.", tools=[tool, WEATHER], tool_choice={"type": "custom", "name": "patch"},
        max_output_tokens=300, temperature=0,
    ) as stream:  # fmt: skip
        pieces = "".join(event.delta for event in stream if event.type == "response.custom_tool_call_input.delta")
        final = stream.get_final_response()
    (call,) = final.output
    assert call.type == "custom_tool_call"
    assert call.input == pieces
    if final.status == "completed":
        assert re.fullmatch(r"\*\*\* Begin Patch\n\*\*\* Add File: .+\n(\+.*\n)+\*\*\* End Patch\n?", call.input)
    assert call.input.startswith("*** Begin Patch\n*** Add File: ")
    result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    after = client.responses.create(
        model="llama", input=[result], previous_response_id=final.id, tools=[tool], max_output_tokens=4, temperature=0
    )
    assert after.output_text


def test_a_forced_custom_tool_gets_an_input_of_its_regular_expression(client: OpenAI) -> None:
    answer = client.responses.create(
        model="llama", input="When?", tools=[custom("clock", "regex", r"(at )?([01]\d|2[0-3]):[0-5]\d")],
        tool_choice="required", max_output_tokens=60, temperature=0,
    )  # fmt: skip
    (call,) = answer.output
    assert call.type == "custom_tool_call"
    assert re.fullmatch(r"(at )?([01]\d|2[0-3]):[0-5]\d", call.input)


@pytest.mark.parametrize("stream", [False, True])
def test_an_input_may_be_empty_where_its_grammar_allows_that(client: OpenAI, stream: bool) -> None:
    body: Any = {"model": "llama", "input": "Clear.", "tools": [custom("clear", "regex", "()")]}
    if stream:
        with client.responses.stream(**body, tool_choice="required") as events:
            (call,) = events.get_final_response().output
    else:
        (call,) = client.responses.create(**body, tool_choice="required").output
    assert call.type == "custom_tool_call"
    assert (call.name, call.input) == ("clear", "")
    assert call.call_id


def test_a_grammar_that_is_wrong_is_named_by_its_place(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(
            model="llama",
            input="x",
            tools=[custom("t", "lark", "start: (")],
            tool_choice={"type": "custom", "name": "t"},
        )
    assert raised.value.param == "tools[0].format.definition"


def test_a_tool_of_a_namespace_is_called_by_both_parts_of_its_name(client: OpenAI) -> None:
    space: Any = {"type": "namespace", "name": "mcp__sky", "description": "The sky.", "tools": [WEATHER]}
    answer = client.responses.create(
        model="llama", input="Weather?", tools=[space], tool_choice="required", parallel_tool_calls=False,
        max_output_tokens=200, temperature=0,
    )  # fmt: skip
    call = call_of(answer)
    assert (call.namespace, call.name) == ("mcp__sky", "weather")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    after = client.responses.create(
        model="llama", input=[result], previous_response_id=answer.id, tools=[space], max_output_tokens=4, temperature=0
    )
    assert after.output_text


def test_a_stored_conversation_gives_what_the_whole_conversation_gives(client: OpenAI) -> None:
    first = client.responses.create(model="llama", input=PROMPT, max_output_tokens=8, temperature=0)
    turns: Any = [{"role": "user", "content": PROMPT}, *first.output, {"role": "user", "content": "Go on."}]
    whole = client.responses.create(model="llama", input=turns, max_output_tokens=8, temperature=0, store=False)
    *_, ended = client.responses.create(
        model="llama", input="Go on.", previous_response_id=first.id, max_output_tokens=8, temperature=0, stream=True
    )
    assert ended.type == "response.incomplete"
    last = ended.response
    assert last.output_text == whole.output_text
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.input_tokens == whole.usage.input_tokens
    assert client.responses.retrieve(last.id).output_text == last.output_text
    assert len(list(client.responses.input_items.list(last.id, limit=2))) == 3
    client.responses.delete(last.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(last.id)


def test_input_tokens_are_those_that_an_answer_counts(client: OpenAI) -> None:
    first = client.responses.create(model="llama", input=PROMPT, tools=[WEATHER], max_output_tokens=2)
    counted = client.responses.input_tokens.count(model="llama", input=PROMPT, tools=[WEATHER])
    assert first.usage is not None
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", first.usage.input_tokens)
    given: Any = {"model": "llama", "input": "And?", "previous_response_id": first.id}
    second = client.responses.create(**given, max_output_tokens=2)
    assert second.usage is not None
    assert client.responses.input_tokens.count(**given).input_tokens == second.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="input"):
        client.responses.input_tokens.count(model="llama", input=[])


def test_any_worker_continues_what_another_one_stored() -> None:
    with machines() as started:
        prefill, decode = started.nodes(("prefill", {"model": LLAMA}), ("decode", {"model": LLAMA}))
        gateway = started.gateway([prefill], [decode], model=LLAMA, http_listen="127.0.0.1:0", workers=2)
        last = None
        for _ in range(8):  # each on a connection of its own, which the kernel gives to one of the workers
            with OpenAI(base_url=f"{gateway.http}/v1", api_key="none", max_retries=0) as client:
                last = client.responses.create(
                    model="llama", input="And?", previous_response_id=last, max_output_tokens=2, temperature=0
                ).id
        with OpenAI(base_url=f"{gateway.http}/v1", api_key="none", max_retries=0) as client:
            assert len(list(client.responses.input_items.list(last))) == 15
