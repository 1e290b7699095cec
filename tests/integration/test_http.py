"""OpenAI's own Python client against a prefill node, a decode node and a gateway."""

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from baton.cli.processes import Process
from tests.integration.cluster import DEADLINE_S, Machines, machines, nothing_held, until_status

PROMPT = "Write the given bytes to the file"
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What does the method return?"}]
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "seek",
        "description": "Moves in the file.",
        "parameters": {
            "type": "object",
            "properties": {"whence": {"enum": ["start", "end"]}},
            "required": ["whence"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = TOOL["function"]["parameters"]
ENDLESS: dict[str, Any] = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}


def custom_tool(name: str, regex: str) -> Any:
    grammar = {"syntax": "regex", "definition": regex}
    return {"type": "custom", "custom": {"name": name, "format": {"type": "grammar", "grammar": grammar}}}


class Cluster(NamedTuple):
    """A gateway with a prefill node and a decode node, whose engine a test may hold."""

    start: Machines
    gateway: Process
    decode: Process


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with machines() as start:
        (prefill,) = start.nodes(("prefill", {}))
        (decode,) = start.nodes(("decode", {}), paused_engine=["decode"])
        start.let_go(decode)
        yield Cluster(start, start.gateway([prefill], [decode]), decode)


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{cluster.gateway.http}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as opened:
        yield opened


def post(client: OpenAI, path: str, body: dict[str, Any]) -> Any:
    """The answer of an endpoint that OpenAI's client does not know."""
    url = str(client.base_url).removesuffix("/v1/") + path
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["llama"]
    assert client.models.retrieve("llama").owned_by == "baton"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_completion_is_the_same_streamed_and_not(client: OpenAI) -> None:
    whole = client.completions.create(model="llama", prompt=PROMPT, max_tokens=12, temperature=0)
    stream = client.completions.create(
        model="llama", prompt=PROMPT, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text != ""
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert last.usage is not None
    assert whole.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.usage.prompt_tokens, 12)


def test_a_batch_of_prompts_is_taken_in_every_form(client: OpenAI) -> None:
    alone = [client.completions.create(model="llama", prompt=each, max_tokens=4, temperature=0) for each in ("a", "b")]
    texts = [completion.choices[0].text for completion in alone]
    batch = client.completions.create(model="llama", prompt=["a", "b"], max_tokens=4, temperature=0)
    assert [choice.text for choice in batch.choices] == texts
    assert batch.usage is not None
    assert batch.usage.completion_tokens == 8
    streamed = ["", ""]
    for chunk in client.completions.create(model="llama", prompt=["a", "b"], max_tokens=4, temperature=0, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    ids = [post(client, "/tokenize", {"prompt": each})["tokens"] for each in ("a", "b")]
    of_ids = client.completions.create(model="llama", prompt=ids, max_tokens=4, temperature=0)
    assert [choice.text for choice in of_ids.choices] == texts


def test_echo_with_logprobs_scores_the_prompt(client: OpenAI) -> None:
    (choice,) = client.completions.create(model="llama", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1).choices
    assert choice.text == PROMPT
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    first, *others = choice.logprobs.token_logprobs
    assert first is None
    assert others
    assert all(logprob < 0 for logprob in others)


def test_several_outputs_are_the_best_of_more(client: OpenAI) -> None:
    several = client.completions.create(model="llama", prompt=PROMPT, max_tokens=6, n=3, seed=1)
    assert sorted(choice.index for choice in several.choices) == [0, 1, 2]
    assert len({choice.text for choice in several.choices}) > 1
    assert several.usage is not None
    assert several.usage.completion_tokens == 18
    best = client.completions.create(model="llama", prompt=PROMPT, max_tokens=6, n=1, best_of=3, seed=1)
    assert best.choices[0].text in {choice.text for choice in several.choices}


def test_a_stop_string_ends_a_completion(client: OpenAI) -> None:
    whole = client.completions.create(model="llama", prompt=PROMPT, max_tokens=12, temperature=0).choices[0].text
    stop = whole.split()[2]
    stopped = client.completions.create(model="llama", prompt=PROMPT, max_tokens=12, temperature=0, stop=stop).choices[
        0
    ]
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole[: whole.index(stop)]


def test_logprobs_of_a_completion_spell_its_text(client: OpenAI) -> None:
    (choice,) = client.completions.create(model="llama", prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2).choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.top_logprobs is not None
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)


def test_a_bias_bans_a_token(client: OpenAI) -> None:
    plain = client.completions.create(
        model="llama", prompt=PROMPT, max_tokens=1, temperature=0, extra_body={"return_token_ids": True}
    ).choices[0]
    (token_id,) = plain.model_extra["token_ids"] if plain.model_extra else []
    banned = client.completions.create(
        model="llama", prompt=PROMPT, max_tokens=1, temperature=0, logit_bias={str(token_id): -100}
    ).choices[0]
    assert post(client, "/detokenize", {"tokens": [token_id]})["prompt"] == plain.text != banned.text


def test_a_chat_is_the_same_streamed_and_not(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="llama", messages=HELLO, max_tokens=12, temperature=0)
    stream = client.chat.completions.create(
        model="llama", messages=HELLO, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == whole.choices[0].message.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content != ""
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens
    assert last.usage.prompt_tokens_details is not None


def test_a_chats_prompt_is_its_template_and_tokenize_shows_it(client: OpenAI) -> None:
    tokens = post(client, "/tokenize", {"messages": HELLO})
    chat = client.chat.completions.create(model="llama", messages=HELLO, max_tokens=1)
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == tokens["count"]


def test_a_chats_logprobs_have_bytes(client: OpenAI) -> None:
    (choice,) = client.chat.completions.create(
        model="llama", messages=HELLO, max_completion_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    ).choices
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert bytes(byte for token in content for byte in token.bytes or []).decode() == choice.message.content
    assert all(len(token.top_logprobs) == 2 for token in content)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "seek"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_that_is_forced_is_valid(client: OpenAI, choice: Any, stream: bool) -> None:
    arguments: dict[str, Any] = {
        "model": "llama",
        "messages": HELLO,
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    if stream:
        with client.chat.completions.stream(**arguments, max_tokens=200, temperature=0) as events:
            answer = events.get_final_completion().choices[0]
    else:
        answer = client.chat.completions.create(**arguments, max_tokens=200, temperature=0).choices[0]
    assert answer.message.tool_calls is not None
    call = answer.message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "seek"
    assert json.loads(call.function.arguments)["whence"] in ("start", "end")


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_custom_tool_gets_an_input_of_its_grammar(client: OpenAI, stream: bool) -> None:
    time = r"(at )?([01]\d|2[0-3]):[0-5]\d"
    body = {
        "model": "llama", "messages": HELLO, "max_tokens": 60, "temperature": 0, "stream": stream,
        "tools": [TOOL, custom_tool("clock", time)], "tool_choice": {"type": "custom", "custom": {"name": "clock"}},
    }  # fmt: skip
    if stream:
        chunks = [chunk.choices[0].to_dict() for chunk in client.chat.completions.create(**body)]
        calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
        text, finish = "".join(call["custom"]["input"] for call in calls), chunks[-1]["finish_reason"]
        assert calls[0]["id"]
    else:
        (choice,) = client.chat.completions.create(**body).choices
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "custom"
        text, finish = call.custom.input, choice.finish_reason
    assert re.fullmatch(time, text)
    assert finish == "tool_calls"


def test_an_input_may_be_empty_where_its_grammar_allows_that(client: OpenAI) -> None:
    body: dict[str, Any] = {"model": "llama", "messages": HELLO, "tools": [custom_tool("clear", "()")]}
    (choice,) = client.chat.completions.create(**body, tool_choice="required").choices
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input, choice.finish_reason) == ("clear", "", "tool_calls")


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("name", ["seek", "tell"])
def test_only_an_allowed_tool_is_called(client: OpenAI, name: str) -> None:
    tell: Any = {"type": "function", "function": {"name": "tell", "parameters": SCHEMA}}
    body: dict[str, Any] = {
        "model": "llama", "messages": HELLO, "tools": [TOOL, tell], "tool_choice": allowed("required", name),
        "max_tokens": 200, "temperature": 0, "parallel_tool_calls": False,
        "extra_headers": {"x-request-id": f"allowed-{name}"},
    }  # fmt: skip

    def pieces(**options: object) -> list[dict[str, Any]]:
        stream = client.chat.completions.create(**body, stream=True, extra_body={"return_token_ids": True, **options})
        return [chunk.choices[0].to_dict() for chunk in stream]

    def arguments(choices: list[dict[str, Any]]) -> str:
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        return "".join(call["function"]["arguments"] for call in calls)

    message = client.chat.completions.create(**body).choices[0].message
    assert message.tool_calls is not None
    (whole,) = message.tool_calls
    assert whole.type == "function"
    assert whole.function.name == name
    assert json.loads(whole.function.arguments)["whence"] in ("start", "end")
    streamed = pieces()
    assert arguments(streamed) == whole.function.arguments
    middle = len(streamed) // 2
    had = [token for choice in streamed[:middle] for token in choice.get("token_ids", ())]
    resumed = pieces(baton={"output_token_ids": had})
    assert arguments(resumed) == arguments(streamed[middle:])
    assert resumed[-1]["finish_reason"] == "tool_calls"


def test_an_allowed_tool_that_is_not_there_is_named(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="function 'tell'") as raised:
        client.chat.completions.create(
            model="llama", messages=HELLO, tools=[TOOL], tool_choice=allowed("auto", "seek", "tell")
        )
    assert raised.value.param == "tool_choice.allowed_tools.tools[1].function.name"


def test_a_grammar_of_a_custom_tool_that_is_wrong_is_named_by_its_place(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(
            model="llama", messages=HELLO, tools=[custom_tool("clock", "(")], tool_choice="required"
        )
    assert raised.value.param == "tools[0].custom.format.grammar.definition"


def test_an_answer_by_schema_is_valid(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="llama",
        messages=HELLO,
        max_tokens=100,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "where", "schema": dict(SCHEMA)}},
    ).choices[0]
    assert answer.finish_reason == "stop"
    assert json.loads(answer.message.content or "")["whence"] in ("start", "end")


def test_a_completion_by_choice_is_one_of_them(client: OpenAI) -> None:
    choices = ["yes", "no"]
    answer = client.completions.create(model="llama", prompt=PROMPT, extra_body={"guided_choice": choices}).choices[0]
    assert answer.text in choices


def test_a_constraint_that_is_not_supported_names_its_field(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="llama", prompt=PROMPT, extra_body={"guided_regex": "("})
    assert caught.value.param == "guided_regex"


def test_errors_are_the_clients_own(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt=PROMPT)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="llama", prompt=PROMPT, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as empty:
        client.chat.completions.create(model="llama", messages=[])
    assert empty.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as unknown_field:
        client.completions.create(model="llama", prompt=PROMPT, extra_body={"colour": "red"})
    assert unknown_field.value.param == "colour"


def test_a_receipt_comes_on_request(client: OpenAI) -> None:
    answer = client.completions.create(
        model="llama", prompt="where " * 100, max_tokens=2, extra_headers={"x-baton-receipt": "1"}
    )
    assert answer.model_extra is not None
    assert answer.model_extra["baton"]["receipt"]["path"] == "remote"


def test_the_request_id_comes_back_and_each_answer_has_its_own_id(client: OpenAI) -> None:
    ids = set()
    for _ in range(2):
        raw = client.completions.with_raw_response.create(
            model="llama",
            prompt=PROMPT,
            max_tokens=1,
            extra_headers={"x-request-id": "mine"},
            extra_body={"baton": {"receipt": True}},
        )
        assert raw.headers["x-request-id"] == "mine"
        answer = raw.parse()
        assert answer.model_extra is not None
        assert answer.model_extra["baton"]["receipt"]["request_id"] == "mine"
        ids.add(answer.id)
    assert len(ids) == 2
    assert all(each.startswith("cmpl-") for each in ids)


async def test_a_client_that_leaves_frees_the_blocks(cluster: Cluster) -> None:
    start, gateway, decode = cluster
    async with AsyncOpenAI(base_url=f"{gateway.http}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        start.allow_steps(5, decode)  # so no answer ends before its client leaves
        whole = asyncio.create_task(client.completions.create(model="llama", prompt=PROMPT, **ENDLESS))
        await until_status(decode, lambda status: status.requests_running == 1)
        whole.cancel()
        await until_status(decode, nothing_held)
        start.allow_steps(5, decode)
        stream = await client.completions.create(model="llama", prompt=PROMPT, stream=True, **ENDLESS)
        await until_status(decode, lambda status: status.requests_running == 1)
        await stream.close()
        await until_status(decode, nothing_held)
    start.let_go(decode)
