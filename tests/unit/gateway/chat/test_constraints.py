"""Grammars of forced calls and of answers after reasoning: what they accept, and that the parser reads it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.gateway.text.chat.model import ChatModel, read_chat_model
from baton.gateway.text.chat.types import ChatRequest, NamedTool
from baton.settings.config import DEMO_MODELS
from tests.unit.gateway.chat import family_formats
from tests.unit.gateway.chat.checkpoints import chat_model, follow, tool
from tests.unit.gateway.chat.outputs import Answer, answer_of

WEATHER = tool(
    "weather",
    {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer"}},
        "required": ["city"],
        "$defs": {"City": {"type": "string"}},
    },
)
CLOCK = tool("clock")
USER = [{"role": "user", "content": "Hi"}]
PARIS, NOTHING = '{"city": "Paris", "days": 2}', "{}"

# How each family writes one call of `weather` and, after it, one of `clock`.
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
HERMES = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'


def xml_call(name: str, given: str) -> str:
    elements = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in json.loads(given).items())
    return f"<tool_call>\n<function={name}>\n{elements}</function>\n</tool_call>"


CALLS: dict[str, Callable[[list[tuple[str, str]]], str]] = {
    "plain": lambda calls: "; ".join(f'{{"name": "{name}", "parameters": {given}}}' for name, given in calls),
    "llama": lambda calls: "; ".join(f'{{"name": "{name}", "parameters": {given}}}' for name, given in calls),
    "llama-pythonic": lambda calls: (
        "["
        + ", ".join(
            f"{name}(" + ", ".join(f"{key}={json.dumps(value)}" for key, value in json.loads(given).items()) + ")"
            for name, given in calls
        )
        + "]"
    ),
    "hermes": lambda calls: "\n".join(HERMES.format(*call) for call in calls),
    "qwen-xml": lambda calls: "\n".join(xml_call(*call) for call in calls),
    "qwen3": lambda calls: "<think>\nHm.\n</think>\n\n" + "\n".join(HERMES.format(*call) for call in calls),
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{given}" for name, given in calls),
    "mistral-array": lambda calls: (
        "[TOOL_CALLS][" + ", ".join(f'{{"name": "{name}", "arguments": {given}}}' for name, given in calls) + "]"
    ),
    "deepseek-v3": lambda calls: (
        "<｜tool▁calls▁begin｜>" + "\n".join(V3.format(*call) for call in calls) + "<｜tool▁calls▁end｜>"
    ),
    "deepseek-v3.1": lambda calls: (
        "<｜tool▁calls▁begin｜>" + "".join(V31.format(*call) for call in calls) + "<｜tool▁calls▁end｜>"
    ),
    "r1": lambda calls: (
        "Hm.\n</think>\n\n<｜tool▁calls▁begin｜>"
        + "\n".join(V3.format(*call) for call in calls)
        + "<｜tool▁calls▁end｜>"
    ),
    "harmony": lambda calls: (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        f"<|channel|>commentary to=functions.{calls[0][0]} <|constrain|>json<|message|>{calls[0][1]}"
    ),
    **family_formats.WRITE,
}
REASONS = {"qwen3", "r1", "harmony", *family_formats.REASONING}
ONE_CALL = {"harmony"}


def answer(model: ChatModel, request: ChatRequest, text: str) -> Answer:
    return answer_of(model.parser(request, model.prepare(request), "seed"), [text])


def grammar(model: ChatModel, request: ChatRequest) -> Grammar:
    made = model.prepare(request).grammar
    assert made is not None
    return made


@pytest.mark.parametrize("family", CALLS)
def test_a_required_call_is_forced_in_the_familys_syntax_and_read(family: str, tmp_path: Path) -> None:
    model = chat_model(tmp_path, family)
    request = ChatRequest(USER, tools=[WEATHER, CLOCK], tool_choice="required")
    calls = [("weather", PARIS), ("clock", NOTHING)][: 1 if family in ONE_CALL else 2]
    text = CALLS[family](calls)
    followed = follow(grammar(model, request), text)
    assert followed.accepted == text
    assert followed.complete
    read = answer(model, request, text)
    assert [(name, json.loads(given)) for name, given in read.calls] == [
        (name, json.loads(given)) for name, given in calls
    ]
    assert read.content == ""
    assert read.reasoning == ("Hm." if family in REASONS else "")


@pytest.mark.parametrize("family", CALLS)
def test_a_required_call_admits_no_plain_answer_no_wrong_argument_and_no_unknown_tool(
    family: str, tmp_path: Path
) -> None:
    model = chat_model(tmp_path, family)
    made = grammar(model, ChatRequest(USER, tools=[WEATHER, CLOCK], tool_choice="required"))
    if family not in REASONS:
        assert follow(made, "No.").accepted == ""
    if family == "harmony":
        assert not follow(made, "<|channel|>final<|message|>No.").complete
    any_text = family in {"qwen-xml", *family_formats.UNTYPED}  # where every text is a city
    wrong = [] if any_text else [("weather", '{"city": 3}')]
    for call in (*wrong, ("weather", '{"town": "Paris"}'), ("weather", "{}"), ("other", "{}")):
        assert not follow(made, CALLS[family]([call])).complete


@pytest.mark.parametrize("family", CALLS)
def test_a_call_whose_arguments_could_be_no_object_is_not_forced(family: str, tmp_path: Path) -> None:
    model = chat_model(tmp_path, family)
    for schema in ({"type": "string"}, {"type": ["array", "null"]}):
        request = ChatRequest(USER, tools=[tool("f", schema)], tool_choice="required")
        with pytest.raises(InvalidRequest, match=r"arguments of f has the type .* allowed: object"):
            model.prepare(request)
    assert grammar(model, ChatRequest(USER, tools=[tool("f", {"type": ["object", "null"]})], tool_choice="required"))


@pytest.mark.parametrize("family", CALLS)
def test_a_named_tool_is_the_only_one(family: str, tmp_path: Path) -> None:
    model = chat_model(tmp_path, family)
    made = grammar(model, ChatRequest(USER, tools=[WEATHER, CLOCK], tool_choice=NamedTool("clock")))
    assert follow(made, CALLS[family]([("clock", NOTHING)])).complete
    assert not follow(made, CALLS[family]([("weather", PARIS)])).complete


@pytest.mark.parametrize("family", sorted(CALLS.keys() - ONE_CALL))
def test_a_named_tool_is_called_once(family: str, tmp_path: Path) -> None:
    model = chat_model(tmp_path, family)
    made = grammar(model, ChatRequest(USER, tools=[WEATHER, CLOCK], tool_choice=NamedTool("clock")))
    assert not follow(made, CALLS[family]([("clock", NOTHING), ("clock", NOTHING)])).complete


@pytest.mark.parametrize("family", sorted(CALLS.keys() - ONE_CALL))
def test_without_parallel_calls_there_is_one(family: str, tmp_path: Path) -> None:
    model = chat_model(tmp_path, family)
    request = ChatRequest(USER, tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=False)
    made = grammar(model, request)
    assert follow(made, CALLS[family]([("clock", NOTHING)])).complete
    assert not follow(made, CALLS[family]([("clock", NOTHING), ("clock", NOTHING)])).complete


def test_an_array_of_calls_may_follow_a_space(tmp_path: Path) -> None:
    model = chat_model(tmp_path, "mistral-array")
    made = grammar(model, ChatRequest(USER, tools=[CLOCK], tool_choice="required"))
    assert follow(made, CALLS["mistral-array"]([("clock", NOTHING)]).replace("][{", "] [{")).complete


def test_pythonic_calls_may_leave_out_what_is_not_required(tmp_path: Path) -> None:
    properties = {name: {"type": "integer"} for name in "abcd"}
    model = chat_model(tmp_path, "llama-pythonic")
    parameters = {"type": "object", "properties": properties, "required": ["b"]}
    made = grammar(model, ChatRequest(USER, tools=[tool("f", parameters)], tool_choice="required"))
    for text in ("[f(b=1)]", "[f(b=2, a=1)]", "[f(b=1, d=2)]", "[f(b=2, a=1, c=3, d=4)]"):
        assert follow(made, text).complete, text
    for text in ("[f()]", "[f(a=1)]", "[f(b=1, )]", "[f(b=1 c=2)]"):
        assert not follow(made, text).complete, text
    made = grammar(model, ChatRequest(USER, tools=[tool("f", {"properties": properties})], tool_choice="required"))
    for text in ("[f()]", "[f(a=1)]", "[f(b=1)]", "[f(a=1, d=2)]", "[f(a=1, b=2, c=3, d=4)]"):
        assert follow(made, text).complete, text
    for text in ("[f(b=1, a=1)]", "[f(a=1, )]", "[f(, a=1)]"):
        assert not follow(made, text).complete, text


@pytest.mark.parametrize(
    "family", ["hermes", "llama-pythonic", "qwen-xml", "harmony", "glm", "kimi-k2", "minimax-m2", "functiongemma"]
)
def test_many_tools_make_few_rules(family: str, tmp_path: Path) -> None:
    properties = {name: {"type": "string"} for name in "abcdefgh"}
    tools = [tool(f"f{index}", {"properties": properties, "required": ["a"]}) for index in range(200)]
    made = grammar(chat_model(tmp_path, family), ChatRequest(USER, tools=tools, tool_choice="required"))
    assert made.text.count("\n") < 20


def test_xml_calls_have_values_of_the_schemas_types(tmp_path: Path) -> None:
    properties = {"n": {"type": "integer"}, "unit": {"type": "string", "enum": ["C", "F"]}, "text": {"type": "string"}}
    model = chat_model(tmp_path, "qwen-xml")
    request = ChatRequest(USER, tools=[tool("f", {"properties": properties})], tool_choice="required")
    made = grammar(model, request)
    for given in ({"n": 3, "unit": "F", "text": "</tool_call> <b>\n"}, {"unit": "C"}, {}):
        text = xml_call("f", json.dumps(given))
        assert follow(made, text).complete or "</tool_call>" in str(given)
        [(name, read)] = answer(model, request, text).calls
        assert (name, json.loads(read)) == ("f", given)
    for wrong in ({"n": "x"}, {"unit": "K"}, {"other": 1}):
        assert not follow(made, xml_call("f", json.dumps(wrong))).complete


@pytest.mark.parametrize(
    ("schema", "written", "read", "wrong"),
    [
        ({"type": ["string", "null"]}, "Paris", '"Paris"', None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", "null", None),
        ({"enum": ["a", 1, None]}, "a", '"a"', "b"),
        ({"enum": ["a", 1, None]}, "1", "1", "2"),
        ({"enum": ["a", 1, None]}, "null", "null", '"null"'),
        ({"anyOf": [{"const": "auto"}, {"type": "integer"}]}, "auto", '"auto"', "none"),
        ({"anyOf": [{"const": "auto"}, {"type": "integer"}]}, "12", "12", "1.5"),
        ({"type": ["boolean", "null"]}, "true", "true", "yes"),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", "[1, 2]", "[true]"),
        ({}, "42", '"42"', None),
    ],
)
def test_what_is_forced_without_a_type_is_read_as_the_schema_allows(
    schema: dict[str, object], written: str, read: str, wrong: str | None, tmp_path: Path
) -> None:
    model = chat_model(tmp_path, "qwen-xml")
    given = {"properties": {"a": schema}, "required": ["a"]}
    request = ChatRequest(USER, tools=[tool("f", given)], tool_choice="required")
    text = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    made = grammar(model, request)
    assert follow(made, text.format(written)).complete
    assert answer(model, request, text.format(written)).calls == [("f", f'{{"a": {read}}}')]
    assert wrong is None or not follow(made, text.format(wrong)).complete


def test_xml_calls_with_open_arguments_take_any(tmp_path: Path) -> None:
    model = chat_model(tmp_path, "qwen-xml")
    request = ChatRequest(USER, tools=[tool("f", {"additionalProperties": {}})], tool_choice="required")
    text = xml_call("f", '{"x": "a", "y": "b"}')
    assert follow(grammar(model, request), text).complete
    assert answer(model, request, text).calls == [("f", '{"x": "a", "y": "b"}')]


def test_pythonic_calls_with_open_arguments_are_json(tmp_path: Path) -> None:
    model = chat_model(tmp_path, "llama-pythonic")
    request = ChatRequest(
        USER, tools=[tool("f", {"additionalProperties": {"type": "integer"}})], tool_choice="required"
    )
    text = '{"name": "f", "parameters": {"x": 1}}'
    assert follow(grammar(model, request), text).complete
    assert answer(model, request, text).calls == [("f", '{"x": 1}')]


SCHEMA = (
    '{"type": "object", "properties": {"z": {"type": "integer"}}, "required": ["z"], "additionalProperties": false}'
)
ANSWERS = [
    (Grammar(GrammarKind.JSON_OBJECT), '{"a": [1]}', "[1]"),
    (Grammar(GrammarKind.JSON_SCHEMA, SCHEMA), '{"z": 1}', '{"y": 1}'),
    (Grammar(GrammarKind.CHOICE, '["yes", "n\\"o"]'), 'n"o', "maybe"),
    (Grammar(GrammarKind.REGEX, r"^[a-z]+\/\\/\d+$"), "ab/\\/12", "ab//12"),
    (Grammar(GrammarKind.LARK, 'start: "x" y\ny: "y"+'), "xyy", "xx"),
    (Grammar(GrammarKind.GBNF, 'root ::= "a" b\nb ::= "b" | "\\x63"'), "ac", "ad"),
]


@pytest.mark.parametrize(("given", "right", "wrong"), ANSWERS)
@pytest.mark.parametrize(
    ("family", "before"),
    [
        ("r1", "Hm {.\n</think>\n\n"),
        ("qwen3", "<think>Hm {</think>\n"),
        ("qwen3", ""),
        ("harmony", "<|channel|>analysis<|message|>Hm {<|end|><|start|>assistant<|channel|>final<|message|>"),
        ("harmony", "<|channel|>final<|message|>"),
    ],
)
def test_an_answers_grammar_applies_after_the_reasoning(
    given: Grammar, right: str, wrong: str, family: str, before: str, tmp_path: Path
) -> None:
    model = chat_model(tmp_path, family)
    request = ChatRequest(USER, grammar=given)
    made = grammar(model, request)
    assert follow(made, before + right).complete
    assert not follow(made, before + wrong).complete
    assert answer(model, request, before + right).content == right


def test_without_reasoning_the_requests_grammar_is_unchanged(tmp_path: Path) -> None:
    given = Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)
    model = chat_model(tmp_path, "qwen3")
    assert model.prepare(ChatRequest(USER, grammar=given, template_kwargs={"enable_thinking": False})).grammar is given
    tags = Grammar(GrammarKind.STRUCTURAL_TAG, "{}")
    assert model.prepare(ChatRequest(USER, grammar=tags)).grammar is tags


@pytest.mark.parametrize("family", ["hermes", "mistral", "mistral-array", "deepseek-v3", "harmony"])
def test_an_answers_grammar_leaves_calls_free(family: str, tmp_path: Path) -> None:
    model = chat_model(tmp_path, family)
    made = grammar(model, ChatRequest(USER, tools=[CLOCK], grammar=Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)))
    final = "<|channel|>final<|message|>" if family == "harmony" else ""
    assert follow(made, CALLS[family]([("clock", NOTHING)])).complete
    assert follow(made, final + '{"z": 1}').complete
    assert not follow(made, final + "No.").complete


def test_markers_that_are_no_special_tokens_are_forced_as_text(tmp_path: Path) -> None:
    chat_model(tmp_path, "harmony")
    (tmp_path / "tokenizer.json").write_text((DEMO_MODELS / "llama" / "tokenizer.json").read_text())
    model = read_chat_model(tmp_path, None)
    made = grammar(model, ChatRequest(USER, tools=[CLOCK], tool_choice="required"))
    text = CALLS["harmony"]([("clock", NOTHING)])
    assert follow(made, text, special=False).complete


@pytest.mark.parametrize("text", ["{", '{"grammars": []}'])
def test_a_grammar_that_cannot_follow_reasoning_is_refused(text: str, tmp_path: Path) -> None:
    model = chat_model(tmp_path, "r1")
    kind = GrammarKind.LARK if "grammars" in text else GrammarKind.JSON_SCHEMA
    with pytest.raises(InvalidRequest) as caught:
        model.prepare(ChatRequest(USER, grammar=Grammar(kind, text)))
    assert caught.value.field == "grammar"
