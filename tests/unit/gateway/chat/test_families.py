"""Each of the newer families: its template is known and renders conversations with calls and results, what the models
write, well and badly, is read, and calls that a grammar forces are read back."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.gateway.text.chat.families import UNKNOWN, family_of, reasoning_of
from baton.gateway.text.chat.model import ChatModel, read_chat_model
from baton.gateway.text.chat.types import ChatRequest, Json
from tests.unit.gateway.chat.checkpoints import chat_model, follow, tool, write_checkpoint
from tests.unit.gateway.chat.family_formats import NAMES, REASONING, TEMPLATES, UNTYPED, WRITE
from tests.unit.gateway.chat.outputs import Answer, answer_of

WRITING = tool(
    "write",
    {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "times": {"type": "integer"},
            "dry": {"type": "boolean"},
            "options": {"type": "object", "properties": {"deep": {"type": "array", "items": {"type": "integer"}}}},
            "mode": {"enum": ["new", "append"]},
            "note": {"type": ["string", "null"]},
        },
        "required": ["path"],
    },
)
CLOCK = tool("clock")
TOOLS = [WRITING, CLOCK]
USER: list[Json] = [{"role": "user", "content": "Hi"}]
GIVEN = {
    "path": "Straße/日本 é",
    "text": "if a < b:\n    print(\"x\", 'y')\n\tend }]",
    "times": 3,
    "dry": True,
    "options": {"deep": [1, 2]},
    "mode": "append",
}
THOUGHT, SAID = "Here is my thought process", "Here is my response"
# Texts that look like something else, for parameters that are strings.
LOOKALIKES = ["42", "1.50", "true", "null ", '{"a": [1, "b"]}', "[1, 2]", '"quoted"', " leading", "007"]


def written(family: str, *calls: tuple[str, Any]) -> str:
    return WRITE[family]([(name, json.dumps(given, ensure_ascii=False)) for name, given in calls])


def read(model: ChatModel, text: str, *, tools: list[Any] = TOOLS, pieces: int = 0, cut: bool = False) -> Answer:
    """`pieces`: the length of each piece in which the text comes; 0: it comes whole."""
    request = ChatRequest(USER, tools=tools)
    parser = model.parser(request, model.prepare(request), "seed")
    parts = [text[start : start + pieces] for start in range(0, len(text), pieces)] if pieces else [text]
    return answer_of(parser, parts, cut=cut)


def values(answer: Answer) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in answer.calls]


@pytest.mark.parametrize("family", WRITE)
def test_a_template_shows_its_family(family: str) -> None:
    assert family_of(TEMPLATES[family], "").name == NAMES[family]


@pytest.mark.parametrize("family", WRITE)
def test_two_calls_at_once_with_text_of_any_kind_are_read_wherever_the_output_is_cut(
    family: str, tmp_path: Path
) -> None:
    model = chat_model(tmp_path, family)
    text = written(family, ("write", GIVEN), ("clock", {}))
    whole = read(model, text)
    assert values(whole) == [("write", GIVEN), ("clock", {})]
    assert whole.content == ""
    assert whole.reasoning == ("Hm." if family in REASONING else "")
    for pieces in (1, 2, 3, 7, 16):
        assert read(model, text, pieces=pieces) == whole


@pytest.mark.parametrize("family", WRITE)
def test_an_output_that_ends_anywhere_gives_valid_json(family: str, tmp_path: Path) -> None:
    model = chat_model(tmp_path, family)
    text = written(family, ("write", GIVEN), ("clock", {}))
    request = ChatRequest(USER, tools=TOOLS)
    prepared = model.prepare(request)
    for end in range(0, len(text), 3):
        for _, arguments in answer_of(model.parser(request, prepared, "seed"), [text[:end]]).calls:
            json.loads(arguments)


@pytest.mark.parametrize("family", sorted(WRITE.keys() - {"xlam"}))  # its bare array must begin the answer
def test_text_before_and_after_calls_is_content(family: str, tmp_path: Path) -> None:
    model = chat_model(tmp_path, family)
    text = written(family, ("clock", {}))
    before, found, rest = text.rpartition("</think>\n\n")
    answer = read(model, f"{before}{found}Let me look.\n{rest}\n\nDone.")
    assert values(answer) == [("clock", {})]
    assert answer.content.replace("Let me look.", "") in ("Done.", "")
    assert answer.content.startswith("Let me look.")


@pytest.mark.parametrize("family", sorted(UNTYPED))
@pytest.mark.parametrize("text", LOOKALIKES)
def test_a_string_stays_a_string_whatever_it_looks_like(family: str, text: str, tmp_path: Path) -> None:
    model = chat_model(tmp_path, family)
    given = {"path": text, "text": text}
    assert values(read(model, written(family, ("write", given)))) == [("write", given)]


@pytest.mark.parametrize("family", sorted(UNTYPED))
def test_a_null_is_null_where_the_schema_allows_it(family: str, tmp_path: Path) -> None:
    model = chat_model(tmp_path, family)
    given = {"path": "a", "note": None}
    assert values(read(model, written(family, ("write", given)))) == [("write", given)]


@pytest.mark.parametrize("family", WRITE)
def test_a_call_that_a_grammar_forces_is_read_back(family: str, tmp_path: Path) -> None:
    model = chat_model(tmp_path, family)
    request = ChatRequest(USER, tools=TOOLS, tool_choice="required")
    prepared = model.prepare(request)
    assert prepared.grammar is not None
    text = written(family, ("write", GIVEN), ("clock", {}), ("write", {"path": "a"}))
    followed = follow(prepared.grammar, text)
    assert followed.accepted == text
    assert followed.complete
    answer = answer_of(model.parser(request, prepared, "seed"), [text])
    assert values(answer) == [("write", GIVEN), ("clock", {}), ("write", {"path": "a"})]


@pytest.mark.parametrize("family", sorted(UNTYPED))
def test_a_tool_with_open_arguments_takes_any(family: str, tmp_path: Path) -> None:
    model = chat_model(tmp_path, family)
    request = ChatRequest(USER, tools=[tool("f", {"additionalProperties": {}})], tool_choice="required")
    prepared = model.prepare(request)
    assert prepared.grammar is not None
    text = written(family, ("f", {"x": "a b", "y": "{"}))
    assert follow(prepared.grammar, text).complete
    answer = answer_of(model.parser(request, prepared, "seed"), [text])
    assert values(answer) == [("f", {"x": "a b", "y": "{"})]


@pytest.mark.parametrize("family", WRITE)
def test_a_conversation_with_calls_and_results_is_rendered_in_the_models_own_markup(
    family: str, tmp_path: Path
) -> None:
    model = chat_model(tmp_path, family)
    calls = [("functions.write:0", "write", {"path": "a é"}), ("functions.clock:1", "clock", {})]
    messages: list[Json] = [
        *USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
                for id, name, given in calls
            ],
        },
        {"role": "tool", "tool_call_id": "functions.write:0", "content": "written"},
        {"role": "tool", "tool_call_id": "functions.clock:1", "content": "12:00"},
        {"role": "user", "content": "Again"},
    ]
    prompt = model.prepare(ChatRequest(messages, tools=TOOLS)).prompt
    _, _, markup = written(family, *((name, given) for _, name, given in calls)).rpartition("</think>")
    tags = [piece for piece in markup.replace("\n", "").split(" ") if piece]
    assert all(piece in prompt.replace("\n", "") for piece in tags)
    assert prompt.index("written") < prompt.index("12:00") < prompt.index("Again")


BROKEN = [
    # A call without its end, or without the tag around it.
    ("glm", "<tool_call>clock\n", [("clock", {})], "<tool_call>clock\n"),
    ("glm", "<tool_call>write<arg_key>path</arg_key><arg_value>a</arg_value>", [("write", {"path": "a"})], ""),
    ("glm", "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a\n</tool_call>", [("write", {"path": "a"})], ""),
    (
        "glm",
        "<tool_call>write<arg_key>path</arg_key><arg_value>a<arg_key>times</arg_key><arg_value>2</arg_value></tool_call>",
        [("write", {"path": "a", "times": 2})],
        "",
    ),
    ("glm", "<tool_call>write<arg_key>path</arg_key></tool_call>", [("write", {})], ""),
    ("glm", '<tool_call>{"name": "clock", "arguments": {}}</tool_call>', [("clock", {})], ""),
    (
        "glm",
        "<tool_call>write<arg_key>text</arg_key><arg_value>use </tool_call> here</arg_value></tool_call>",
        [("write", {"text": "use </tool_call> here"})],
        "",
    ),
    ("hunyuan", "<tool_call>clock<tool_sep>\n</tool_call>", [("clock", {})], ""),
    (
        "minimax-m2",
        '</think><invoke name="write">\n<parameter name="path">a</parameter>\n</invoke>\n</minimax:tool_call>',
        [("write", {"path": "a"})],
        "",
    ),
    ("minimax-m2", '</think>Use <invoke name="x"> there.', [], 'Use <invoke name="x"> there.'),
    (
        "minimax-m2",
        "</think><minimax:tool_call><invoke name='write'><parameter name=path>\na\n<parameter name=\"times\">2"
        "</parameter></invoke></minimax:tool_call>",
        [("write", {"path": "a", "times": 2})],
        "",
    ),
    (
        "seed-oss",
        "<function=write>\n<parameter=path>a\nb\n<parameter=times>2</parameter></function>",
        [("write", {"path": "a\nb", "times": 2})],
        "",
    ),
    (
        "deepseek-v3.2",
        '<｜DSML｜invoke name="write">\n{"path": "a\nb", "times": 2,}\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        [("write", {"path": "a\nb", "times": 2})],
        "",
    ),
    (
        "deepseek-v3.2",
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">[1]'
        '</｜DSML｜parameter><｜DSML｜parameter name="b" string="true">[1]</｜DSML｜parameter></｜DSML｜invoke>',
        [("f", {"a": [1], "b": "[1]"})],
        "",
    ),
    (
        "deepseek-v3.2",
        '<｜DSML｜function_calls><｜DSML｜invoke name="write"><｜DSML｜parameter name="path" string="false">7'
        '</｜DSML｜parameter><｜DSML｜parameter name="times" string="true">7</｜DSML｜parameter></｜DSML｜invoke>',
        [("write", {"path": "7", "times": 7})],
        "",
    ),
    # Kimi without its section, without numbers, and with a dotted name.
    (
        "kimi-k2",
        "<|tool_call_begin|>clock:3 <|tool_call_argument_begin|> {} <|tool_call_end|>",
        [("clock", {})],
        "",
    ),
    (
        "kimi-k2",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.a.b:0<|tool_call_argument_begin|>{"x": "line\nbreak"'
        "<|tool_call_end|><|tool_calls_section_end|>",
        [("a.b", {"x": "line\nbreak"})],
        "",
    ),
    ("kimi-k2", "<|tool_calls_section_begin|>oh", [], "<|tool_calls_section_begin|>oh"),
    # Arrays: a raw line break, a missing bracket, text in place of a call.
    ("granite", '<tool_call>[{"name": "f", "arguments": {"x": "a\nb"}}]', [("f", {"x": "a\nb"})], ""),
    ("granite", '<|tool_call|> {"name": "f", "arguments": {"x": 1}', [("f", {"x": 1})], ""),
    ("granite", "<|tool_call|>none", [], "<|tool_call|>none"),
    ("hunyuan-a13b", '<tool_calls>\n{"name": "f"}\n{"name": "g"}\n</tool_calls>', [("f", {}), ("g", {})], ""),
    ("hunyuan-a13b", '<tool_calls>[{"name": "f", "arguments": {"x": [1}}]</tool_calls>', [("f", {"x": [1]})], ""),
    ("longcat", '<longcat_tool_call>{"name": "f", "arguments": {"x": 1}', [("f", {"x": 1})], ""),
    ("phi-4", '<|tool_call|>{"name": "f", "arguments": {}}<|/tool_call|>', [("f", {})], ""),
    ("phi-4", 'functools[{"name": "f", "arguments": {"x": 1}}]', [("f", {"x": 1})], ""),
    ("xlam", '```json\n[{"name": "clock", "arguments": {}}]\n```', [("clock", {})], ""),
    ("xlam", 'I call.\n<tool_call>[{"name": "clock", "arguments": {}}]</tool_call>', [("clock", {})], "I call."),
    ("xlam", '[{"name": "Bob", "arguments": {}}]', [], '[{"name": "Bob", "arguments": {}}]'),
    # Gemma: an open string, nested values in both notations, keys in quotes, words without a mark.
    ("functiongemma", "<start_function_call>call:write{path:<escape>a", [("write", {"path": "a"})], ""),
    (
        "functiongemma",
        "<start_function_call>call:f{o:{a:<escape>x, {y}<escape>,b:[1,<escape>z<escape>]},n:-1.5,t:true}"
        "<end_function_call>",
        [("f", {"o": {"a": "x, {y}", "b": [1, "z"]}, "n": -1.5, "t": True})],
        "",
    ),
    (
        "functiongemma",
        '<start_function_call>call:write{path:some words,times:"3",options:{"deep":[1,2]<end_function_call>',
        [("write", {"path": "some words", "times": 3, "options": {"deep": [1, 2]}})],
        "",
    ),
    ("functiongemma", "<start_function_call>call:write{times:<escape>3<escape>}", [("write", {"times": 3})], ""),
    ("functiongemma", "<start_function_call>call me", [], "<start_function_call>call me"),
    ("gemma-4", '<|tool_call>call:f{"a":<|"|>b<|"|>}<tool_call|> Done.', [("f", {"a": "b"})], "Done."),
    (
        "tool-code",
        "```tool_code\nprint(clock())\nwrite(path='a')\n```\nDone.",
        [("clock", {}), ("write", {"path": "a"})],
        "Done.",
    ),
    ("tool-code", "```tool_code\nx = 1\n```", [], "```tool_code\nx = 1\n```"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "calls", "content"), BROKEN)
def test_slightly_broken_calls_are_read(
    family: str, text: str, calls: list[tuple[str, Any]], content: str, tmp_path: Path
) -> None:
    model = chat_model(tmp_path, family)
    if content == text:
        calls = []
    answer = read(model, text)
    assert values(answer) == calls
    assert answer.content == content
    assert read(model, text, pieces=1) == answer


def test_deepseek_v4_has_another_tag_around_the_same_calls(tmp_path: Path) -> None:
    template = TEMPLATES["deepseek-v3.2"].replace("function_calls", "tool_calls")
    assert family_of(template, "").name == "deepseek-v4"
    write_checkpoint(tmp_path, template)
    model = read_chat_model(tmp_path, None)
    text = written("deepseek-v3.2", ("write", GIVEN), ("clock", {})).replace("function_calls", "tool_calls")
    assert values(read(model, text)) == [("write", GIVEN), ("clock", {})]
    prepared = model.prepare(ChatRequest(USER, tools=TOOLS, tool_choice="required"))
    assert prepared.grammar is not None
    assert follow(prepared.grammar, text).complete


def test_ids_of_kimis_calls_name_the_function_and_count_the_conversations_calls(tmp_path: Path) -> None:
    model = chat_model(tmp_path, "kimi-k2")
    call = {"id": "functions.clock:0", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages: list[Json] = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.clock:0", "content": "12:00"},
    ]
    request = ChatRequest(messages, tools=TOOLS)
    text = written("kimi-k2", ("clock", {}), ("write", {"path": "a"}))
    answer = answer_of(model.parser(request, model.prepare(request), "seed"), [text])
    assert answer.ids == ["functions.clock:1", "functions.write:2"]


@pytest.mark.parametrize(
    ("template", "open", "close"),
    [
        (TEMPLATES["seed-oss"], "<seed:think>", "</seed:think>"),
        (TEMPLATES["longcat"], "<longcat_think>", "</longcat_think>"),
        (TEMPLATES["gemma-4"], "<|channel>thought", "<channel|>"),
        (TEMPLATES["minimax-m2"], "<think>", "</think>"),
        ("{# ◁think▷ ◁/think▷ #}", "◁think▷", "◁/think▷"),
        ("{# A: B: #}".replace("A", THOUGHT).replace("B", SAID), f"{THOUGHT}:", f"{SAID}:"),
    ],
)  # fmt: skip
def test_a_template_shows_its_markers_of_reasoning(template: str, open: str, close: str) -> None:
    markers = reasoning_of(template)
    assert markers is not None
    assert (markers.open, markers.close) == (open, close)


@pytest.mark.parametrize(
    ("family", "text", "reasoning", "content"),
    [
        ("seed-oss", "<seed:think>Hm.</seed:think>\nHi", "Hm.", "Hi"),
        ("gemma-4", "<|channel>thought\nHm.\n<channel|>Hi", "Hm.", "Hi"),
        ("glm", "\n<think>Hm.</think>\nHi", "Hm.", "Hi"),
        ("glm", "\n<think></think>\nHi", "", "Hi"),
        ("glm", "</think>\n\nHi", "", "Hi"),
        ("glm", "So </think> is text", "", "So </think> is text"),
        ("hunyuan-a13b", "<answer>\nHi </b>\n</answer>", "", "Hi </b>"),
        ("ernie", "Hm.\n</think>\n\n<response>\nHi\n</response>\n", "Hm.", "Hi\n"),
        ("ernie", "Hm.\n</think>\n\nHi", "Hm.", "Hi"),
        ("ernie", "Hm.\n</think>\n\n<response>\nHi </resp", "Hm.", "Hi </resp"),
        ("minimax-m2", "Hm.\n</think>\n\n<response>Hi", "Hm.", "<response>Hi"),
    ],
)
def test_reasoning_and_tags_around_answers_are_read_in_each_familys_markers(
    family: str, text: str, reasoning: str, content: str, tmp_path: Path
) -> None:
    template_has = {"hunyuan-a13b": "<think>"}
    model = chat_model(tmp_path, family)
    text = f"{template_has[family]}</think>{text}" if family in template_has else text
    answer = read(model, text)
    assert (answer.reasoning, answer.content) == (reasoning, content)
    assert read(model, text, pieces=1) == answer


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("Hm.\n</think>\n\nHi", "Hm.", "Hi", []),
        ("<think>Hm.</think>Hi", "Hm.", "Hi", []),
        ("</think>Hi", "", "Hi", []),
        ("Hm.\n<tool_call>clock\n</tool_call>", "Hm.\n", "", [("clock", {})]),
        ("Hi", "Hi", "Hi", []),  # the model did not reason: its answer is not lost
    ],
)
def test_reasoning_that_the_client_turned_on_needs_no_opening_marker(
    text: str, reasoning: str, content: str, calls: list[tuple[str, Any]], tmp_path: Path
) -> None:
    model = chat_model(tmp_path, "glm")
    request = ChatRequest(USER, tools=TOOLS, template_kwargs={"enable_thinking": True})
    prepared = model.prepare(request)
    for pieces in ([text], list(text)):
        answer = answer_of(model.parser(request, prepared, "seed"), pieces)
        assert (answer.reasoning, answer.content, values(answer)) == (reasoning, content, calls)


def test_a_marker_that_the_prompt_has_closed_already_is_dropped_once(tmp_path: Path) -> None:
    model = chat_model(tmp_path, "glm")
    request = ChatRequest(USER, template_kwargs={"enable_thinking": False})
    prepared = model.prepare(request)
    assert prepared.prompt.endswith("</think>")
    answer = answer_of(model.parser(request, prepared, "seed"), ["\n</think>\n\nHi </think>"])
    assert (answer.reasoning, answer.content) == ("", "Hi </think>")


@pytest.mark.parametrize(("family", "unread"), [("unknown", True), ("hermes", False), ("glm", False), ("plain", False)])
def test_a_template_with_tools_in_an_unknown_format_is_known_to_be_unread(
    family: str, unread: bool, tmp_path: Path
) -> None:
    model = chat_model(tmp_path, family)
    assert model.unread_templates == (("default",) if unread else ())
    assert len(model.warnings) == unread
    assert model.leaves_calls_unread(ChatRequest(USER, tools=TOOLS)) is unread
    for readable in (
        ChatRequest(USER),
        ChatRequest(USER, tools=TOOLS, tool_choice="none"),
        ChatRequest(USER, tools=TOOLS, tool_choice="required"),
        ChatRequest(USER, tools=TOOLS, raw_tool="f"),
    ):
        assert not model.leaves_calls_unread(readable)


def test_a_template_that_reads_tools_from_the_system_message_gets_them_there(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' and 'tools' in m and m['tools'] is not none %}"
        "<|system|>{{ m.content }}<|tool|>{{ m['tools'] }}<|/tool|><|end|>"
        "{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}<|assistant|>"
    )
    chat_model(tmp_path, "plain")
    (tmp_path / "chat_template.jinja").write_text(template)
    model = read_chat_model(tmp_path, None)
    shown = '<|tool|>[{"name": "clock"}]<|/tool|><|end|>'
    assert shown in model.prepare(ChatRequest(USER, tools=[CLOCK])).prompt
    system: list[Json] = [{"role": "system", "content": "Be brief."}, *USER]
    assert f"<|system|>Be brief.{shown}" in model.prepare(ChatRequest(system, tools=[CLOCK])).prompt
    assert "<|tool|>" not in model.prepare(ChatRequest(system)).prompt
    assert family_of(template, "") is not UNKNOWN
