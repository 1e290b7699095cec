"""OpenAI's bodies become the requests that they mean."""

import json
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.gateway.http.bodies import ChatBody, CompletionBody
from baton.gateway.http.body_reader import parse
from baton.gateway.http.translate import chat_message, chat_request, completion_messages, grammar_of
from baton.gateway.text.chat.types import NamedTool
from baton.protos.v1 import common_pb2

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def completion(**fields: object) -> CompletionBody:
    return parse(CompletionBody, json.dumps({"prompt": "a", **fields}).encode())


def chat(**fields: object) -> ChatBody:
    return parse(ChatBody, json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode())


def test_absent_numbers_stay_absent_so_that_the_models_own_defaults_apply() -> None:
    (message,) = completion_messages(completion(), "r")
    for name in ("temperature", "top_p", "top_k", "max_tokens", "seed", "logprobs", "repetition_penalty"):
        assert not message.sampling.HasField(name), name


def test_every_sampling_parameter_is_passed_on() -> None:
    body = completion(
        model="m", temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.5, min_tokens=2, max_tokens=9, seed=3, stop=["x", "y"], stop_token_ids=[4],
        logit_bias={"7": -100}, ignore_eos=True, include_stop_str_in_output=True, skip_special_tokens=False, logprobs=2,
        prompt_logprobs=1, n=2, best_of=3, cache_salt="salt", priority=-5, truncate_prompt_tokens=4,
        add_special_tokens=False,
    )  # fmt: skip
    (message,) = completion_messages(body, "r")
    sampling = message.sampling
    assert (message.model, message.request_id, message.n, message.best_of) == ("m", "r", 2, 3)
    assert (message.cache_salt, message.priority, message.truncate_prompt_tokens) == ("salt", -5, 4)
    assert not message.add_special_tokens
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert (sampling.min_tokens, sampling.max_tokens, sampling.seed) == (2, 9, 3)
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["x", "y"], [4])
    assert dict(sampling.logit_bias) == {7: -100.0}
    assert (sampling.ignore_eos, sampling.include_stop, sampling.skip_special_tokens) == (True, True, False)
    assert (sampling.logprobs, sampling.prompt_logprobs) == (2, 1)


def test_two_keys_of_a_logit_bias_that_name_one_token_are_both_named() -> None:
    with pytest.raises(InvalidRequest, match=r"logit_bias has the token 5 twice, as '5' and '05'"):
        completion_messages(completion(logit_bias={"5": 1, "7": 2, "05": 1}), "r")
    (message,) = completion_messages(completion(logit_bias={"05": 1, "7": 2}), "r")
    assert dict(message.sampling.logit_bias) == {5: 1.0, 7: 2.0}


@pytest.mark.parametrize(("given", "meant"), [(-1, 0), (0, 0), (3, 3)])
def test_top_k_minus_one_is_off(given: int, meant: int) -> None:
    (message,) = completion_messages(completion(top_k=given), "r")
    assert message.sampling.top_k == meant


def test_a_negative_seed_is_one_of_the_64_bit_seeds() -> None:
    (message,) = completion_messages(completion(seed=-1), "r")
    assert message.sampling.seed == 2**64 - 1


@pytest.mark.parametrize(
    ("prompt", "texts", "token_ids"),
    [
        ("a", ["a"], []),
        (["a", "b"], ["a", "b"], []),
        ([1, 2], [], [[1, 2]]),
        ([[1, 2], [3]], [], [[1, 2], [3]]),
    ],
)
def test_a_prompt_has_four_forms(prompt: object, texts: list[str], token_ids: list[list[int]]) -> None:
    messages = completion_messages(completion(prompt=prompt), "r")
    assert [message.text for message in messages if message.HasField("text")] == texts
    assert [list(message.token_ids.ids) for message in messages if message.HasField("token_ids")] == token_ids


def test_each_prompt_of_several_has_an_id_of_its_own() -> None:
    assert [message.request_id for message in completion_messages(completion(prompt=["a", "b"]), "r")] == ["r-0", "r-1"]


def test_echo_with_logprobs_asks_for_the_prompts_too() -> None:
    (message,) = completion_messages(completion(echo=True, logprobs=2, max_tokens=0), "r")
    assert (message.sampling.prompt_logprobs, message.sampling.max_tokens) == (2, 1)


def test_a_chat_without_a_limit_leaves_it_to_the_context() -> None:
    assert not chat_message(chat(), "r").sampling.HasField("max_tokens")
    assert chat_message(chat(max_tokens=5), "r").sampling.max_tokens == 5
    assert chat_message(chat(max_tokens=5, max_completion_tokens=6), "r").sampling.max_tokens == 6


def test_a_chats_logprobs_are_a_switch_and_a_number() -> None:
    assert not chat_message(chat(), "r").sampling.HasField("logprobs")
    assert chat_message(chat(logprobs=True), "r").sampling.logprobs == 0
    assert chat_message(chat(logprobs=True, top_logprobs=4), "r").sampling.logprobs == 4


def test_a_conversation_is_passed_on() -> None:
    request = chat_request(
        chat(
            tools=[TOOL], parallel_tool_calls=False, chat_template_kwargs={"enable_thinking": False},
            reasoning_effort="low", chat_template="rag", documents=[{"text": "t"}], continue_final_message=True,
        )
    )  # fmt: skip
    assert request.messages == [{"role": "user", "content": "hi"}]
    assert (request.tools, request.parallel_tool_calls, request.template) == ([TOOL], False, "rag")
    kwargs = {"enable_thinking": False, "thinking": False, "reasoning_effort": "low", "documents": [{"text": "t"}]}
    assert request.template_kwargs == kwargs
    assert request.continue_final_message


def test_an_effort_of_none_turns_reasoning_off() -> None:
    assert chat_request(chat(reasoning_effort="none")).template_kwargs == {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({}, "none"),
        ({"tools": [TOOL]}, "auto"),
        ({"tools": [TOOL], "tool_choice": "required"}, "required"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, NamedTool("f")),
    ],
)
def test_tool_choice_is_translated(fields: dict[str, Any], choice: object) -> None:
    assert chat_request(chat(**fields)).tool_choice == choice


@pytest.mark.parametrize("choice", [{}, {"type": "function"}, {"type": "some", "function": {"name": "f"}}])
def test_a_tool_choice_that_names_no_function_is_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_request(chat(tools=[TOOL], tool_choice=choice))
    assert caught.value.field.startswith("tool_choice")


@pytest.mark.parametrize(
    ("fields", "kind", "text", "field"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_OBJECT, "", "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            GrammarKind.JSON_SCHEMA,
            SCHEMA,
            "response_format",
        ),
        ({"guided_json": SCHEMA}, GrammarKind.JSON_SCHEMA, SCHEMA, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, GrammarKind.JSON_SCHEMA, SCHEMA, "guided_json"),
        ({"guided_regex": "a+"}, GrammarKind.REGEX, "a+", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, GrammarKind.CHOICE, ["a", "b"], "guided_choice"),
        ({"guided_grammar": "start: /a+/"}, GrammarKind.LARK, "start: /a+/", "guided_grammar"),
        ({"guided_grammar": 'root ::= "a"'}, GrammarKind.GBNF, 'root ::= "a"', "guided_grammar"),
        ({"structured_outputs": {"regex": "a"}}, GrammarKind.REGEX, "a", "structured_outputs.regex"),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, SCHEMA, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_OBJECT, "", "structured_outputs.json_object"),
    ],
)
def test_each_way_to_write_a_constraint(fields: dict[str, Any], kind: GrammarKind, text: object, field: str) -> None:
    grammar, named = grammar_of(chat(**fields))
    assert grammar is not None
    assert (grammar.kind, named) == (kind, field)
    assert (json.loads(grammar.text) if isinstance(text, dict | list) else grammar.text) == text


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}])
def test_a_body_without_a_constraint_has_no_grammar(fields: dict[str, Any]) -> None:
    assert grammar_of(chat(**fields))[0] is None


def test_two_constraints_exclude_each_other() -> None:
    with pytest.raises(InvalidRequest, match="response_format and guided_regex"):
        grammar_of(chat(response_format={"type": "json_object"}, guided_regex="a"))


def test_a_constraint_goes_with_the_conversation_or_with_the_sampling() -> None:
    assert chat_request(chat(guided_regex="a")).grammar == Grammar(GrammarKind.REGEX, "a")
    (message,) = completion_messages(completion(guided_regex="a"), "r")
    assert message.sampling.grammar == common_pb2.Grammar(regex="a")
