"""Outputs of each family, as models write them, to answer, reasoning and tool calls."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.gateway.text.chat.families import family_of
from baton.gateway.text.chat.parsing.call_list import content_only
from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.deepseek import deepseek
from baton.gateway.text.chat.parsing.harmony import harmony, opened_header
from baton.gateway.text.chat.parsing.llama import llama
from baton.gateway.text.chat.parsing.mistral import mistral
from baton.gateway.text.chat.parsing.parser import FormatParser, Read, ReasoningMarkers, with_reasoning, without_marker
from baton.gateway.text.chat.parsing.tagged_json import hermes
from baton.gateway.text.chat.parsing.xml_call import xml_calls
from tests.unit.gateway.chat.family_formats import TEMPLATES
from tests.unit.gateway.chat.outputs import Answer, cut, parse

THINK = ReasoningMarkers("<think>", "</think>")
LLAMA = llama({"f": {}, "g.h": {}})
HARMONY = harmony(None, tools=True)
NEWER = {"f": {"properties": {"n": {"type": "number"}, "o": {"type": "object"}}}}
FAMILIES = {name: family_of(TEMPLATES[name], "") for name in TEMPLATES if name != "ernie"}
FORMATS: dict[str, Read] = {
    "content": content_only,
    "hermes": hermes,
    "mistral": mistral,
    "deepseek": deepseek,
    "llama": LLAMA,
    "harmony": HARMONY,
    "harmony without tools": harmony(None, tools=False),
    "qwen-xml": xml_calls(
        {"f": {"$defs": {"O": {"type": "object"}}, "properties": {"n": {"type": "number"}, "o": {"$ref": "#/$defs/O"}}}}
    ),
    **{name: family.read(NEWER) for name, family in FAMILIES.items()},
    "qwen3": with_reasoning(THINK, hermes, opened=False),
    "hybrid": with_reasoning(THINK, hermes, opened=False, implied=True, marks=("<tool_call>",)),
    "answer": with_reasoning(replace(THINK, answer=("<answer>", "</answer>")), hermes, opened=True),
    "closed": without_marker("</think>", hermes),
    "r1": with_reasoning(THINK, deepseek, opened=True),
}
V3_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

EXAMPLES: list[tuple[str, str, Answer]] = [
    ("content", " Hello <tool_call> there \n", Answer(content=" Hello <tool_call> there \n")),
    ("hermes", "Just text. {} \n", Answer(content="Just text. {} \n")),
    (
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>\\"", "b": [1, {}]}}\n</tool_call>',
        Answer(content="Let me see.", calls=[("f", '{"a": "}</tool_call>\\"", "b": [1, {}]}')]),
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>\n<tool_call>\n{"name": "g"}\n</tool_call>\n Done.',
        Answer(content="Done.", calls=[("f", '{"a": 1}'), ("g", "{}")]),
    ),
    (
        "hermes",
        '<tool_call>{"id": 7, "x": [true, "]"], "name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        Answer(calls=[("f", '{"a": 1}')]),
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', Answer(calls=[("f", "{}")])),
    # Not calls: everything comes out as it was.
    ("hermes", "<tool_call>\nhm\n</tool_call>", Answer(content="<tool_call>\nhm\n</tool_call>")),
    ("hermes", '<tool_call>{"nam', Answer(content='<tool_call>{"nam')),
    ("hermes", '<tool_call>{"arguments": {}}', Answer(content='<tool_call>{"arguments": {}}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": 3}', Answer(content='<tool_call>{"name": "f", "arguments": 3}')),
    (
        "hermes",
        'a <tool_call>b <tool_call>{"name": "f", "arguments": {}}</tool_call>',
        Answer(content="a <tool_call>b", calls=[("f", "{}")]),
    ),
    # A call that has begun is a call, and its arguments are JSON, whatever is wrong with it.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tr', Answer(calls=[("f", '{"a": true}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {\'a\'}}</tool_call>', Answer(calls=[("f", '{"a": null}')])),
    (
        "hermes",
        '<tool_call>\n<tool_call>{"name": "f", "arguments": {"a": [1, 2}</tool_call> Done.',
        Answer(content="Done.", calls=[("f", '{"a": [1, 2]}')]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "x\ny",}}}}\n</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}, oh',
        Answer(calls=[("f", '{"a": "x\\ny"}'), ("g", "{}")]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "b"; "c"</tool_call><tool_call>{"name": "\\ud83d"}</tool_call>',
        Answer(calls=[("f", '{"a": "b\\"; \\"c"}'), ("\ufffd", "{}")]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1,"}</tool_call>',
        Answer(calls=[("f", '{"a": 1}')]),
    ),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": NaN}}[TOOL_CALLS]g[ARGS]{"b"',
        Answer(calls=[("f", '{"a": null}'), ("g", '{"b": null}')]),
    ),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}}, {"name": "g", "arguments": {}]',
        Answer(calls=[("f", '{"a": 1}'), ("g", "{}")]),
    ),
    (
        "deepseek",
        CALLS_BEGIN + V3_CALL.format("f", '{"a": 1') + V3_CALL.format("g", '{"b": 2}}') + CALLS_END + "Done.",
        Answer(content="Done.", calls=[("f", '{"a": 1\n}'), ("g", '{"b": 2}')]),
    ),
    (
        "deepseek",
        CALLS_BEGIN + '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "b" oh<｜tool▁call▁end｜>' + CALLS_END,
        Answer(calls=[("f", '{"a": "b\\" oh"}')]),
    ),
    ("llama", '{"name": "f", "parameters": {"a": 1}', Answer(calls=[("f", '{"a": 1}')])),
    (
        "llama",
        '[{"name": "f", "parameters": {}}, {"name": "x", "parameters": {}}]',
        Answer(calls=[("f", "{}"), ("x", "{}")]),
    ),
    ("llama", '<|python_tag|>{"name": "f", "parameters": {"a": 1<|python_end|>', Answer(calls=[("f", '{"a": 1}')])),
    ("harmony", "<|channel|>commentary to=functions.<|message|>{}<|call|>", Answer(content="{}")),
    ("harmony", "<|channel|>commentary to=functions.f<|message|><|call|>", Answer(calls=[("f", "{}")])),
    (
        "harmony",
        "<|channel|>commentary to=functions.f<|message|> {'a': 1,}} oh<|call|>",
        Answer(calls=[("f", '{"a": 1}')]),
    ),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>1+1<|call|>", Answer(calls=[("f", '"1+1"')])),
    (
        "mistral",
        'Sure.[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}, "id": "abcdefghi"}]',
        Answer(content="Sure.", calls=[("f", '{"a": 1}'), ("g", "{}")]),
    ),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}',
        Answer(calls=[("f", '{"a": 1}'), ("g", "{}")]),
    ),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', Answer(calls=[("f", '{"a": 1}')])),
    ("mistral", "[TOOL_CALLS] none", Answer(content="[TOOL_CALLS] none")),
    (
        "deepseek",
        "Wait.\n" + CALLS_BEGIN + V3_CALL.format("f", '{"a": 1}') + "\n" + V3_CALL.format("g", "{}") + CALLS_END,
        Answer(content="Wait.", calls=[("f", '{"a": 1}'), ("g", "{}")]),
    ),
    (
        "deepseek",
        CALLS_BEGIN + '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>' + CALLS_END,
        Answer(calls=[("f", '{"a": 1}')]),
    ),
    ("deepseek", CALLS_BEGIN + "<｜tool▁call▁begin｜>?", Answer(content=CALLS_BEGIN + "<｜tool▁call▁begin｜>?")),
    ("llama", '{"name": "f", "parameters": {"a": 1}}', Answer(calls=[("f", '{"a": 1}')])),
    (
        "llama",
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}; {"name": "g.h", "parameters": {"b": 2}}',
        Answer(calls=[("f", "{}"), ("g.h", '{"b": 2}')]),
    ),
    ("llama", '{"name": "Bob", "age": 3}', Answer(content='{"name": "Bob", "age": 3}')),
    ("llama", '{"name": "f", "age": 3}', Answer(content='{"name": "f", "age": 3}')),
    ("llama", '[1, {"name": "f"}]', Answer(content='[1, {"name": "f"}]')),
    ("llama", "<|python_tag|>print(1)", Answer(content="<|python_tag|>print(1)")),
    (
        "llama",
        '{"name": "f", "parameters": {}}; {"name": "x", "parameters": {}}',
        Answer(content='; {"name": "x", "parameters": {}}'.strip(), calls=[("f", "{}")]),
    ),
    (
        "llama",
        "[f(a='it\\'s', b=[1, (2)], c=None, d={'k': True}), g.h(x=true, y=\"a,b)\")]",
        Answer(
            calls=[
                ("f", '{"a": "it\'s", "b": [1, 2], "c": null, "d": {"k": true}}'),
                ("g.h", '{"x": true, "y": "a,b)"}'),
            ]
        ),
    ),
    ("llama", "<|python_start|>[f()]<|python_end|>", Answer(calls=[("f", "{}")])),
    ("llama", "[x(a=1)]", Answer(content="[x(a=1)]")),
    ("llama", "[f(a=1, b=oh no), x()]", Answer(calls=[("f", '{"a": 1, "b": "oh no"}'), ("x", "{}")])),
    (
        "llama",
        "[f(1, a=float('nan'), b=1e5, c=1e999, **d",
        Answer(calls=[("f", '{"a": "float(\'nan\')", "b": 1e5, "c": "1e999"}')]),
    ),
    ("llama", "[f(a='\\d', b={\"x\": NaN", Answer(calls=[("f", '{"a": "\\\\d", "b": {"x": null}}')])),
    (
        "qwen-xml",
        'Ok.\n<tool_call>\n<function=f>\n<parameter=n>\n1.5\n</parameter>\n<parameter=s>\nif a < b:\n  "é"\n'
        "</parameter>\n"
        "<parameter=o>\n{'k': True}\n</parameter>\n</function>\n</tool_call>",
        Answer(content="Ok.", calls=[("f", '{"n": 1.5, "s": "if a < b:\\n  \\"é\\"", "o": {"k": true}}')]),
    ),
    ("qwen-xml", "<tool_call>\n<function=g>\n</function>\n</tool_call>", Answer(calls=[("g", "{}")])),
    ("qwen-xml", "<tool_call>\n<function=>", Answer(content="<tool_call>\n<function=>")),
    ("qwen-xml", "<tool_call><function=f><parameter=s>\nab", Answer(calls=[("f", '{"s": "ab"}')])),
    ("qwen-xml", "<tool_call><function=f>oh</function>", Answer(calls=[("f", "{}")])),
    # As by the models' own parser.
    (
        "qwen-xml",
        "Ok.\n\n<function=f>\n<parameter=s>\n1\n</parameter>\n</function>\n</tool_call>\nDone.",
        Answer(content="Ok.Done.", calls=[("f", '{"s": "1"}')]),
    ),
    (
        "qwen-xml",
        "<tool_call>\n<tool_call>\n<function=f>\n<function=f>\n<parameter=s>\n<parameter=s>\na\n</parameter>\n</parameter>\n"
        "</function>\n</function>\n</tool_call>\n</tool_call>",
        Answer(calls=[("f", '{"s": "a"}')]),
    ),
    (
        "qwen-xml",
        "<tool_call>\n<function=f>\n<parameter=s>\na\n\n</function></function>\n</tool_call>",
        Answer(calls=[("f", '{"s": "a"}')]),
    ),
    (
        "qwen-xml",
        "<tool_call>\n<function=f>\n<parameter=s>\na\n<parameter=n>\n2\n</function>\n</tool_call>",
        Answer(calls=[("f", '{"s": "a", "n": 2}')]),
    ),
    (
        "qwen-xml",
        "<tool_call>\n<function=f>\n<parameter=n>\n2\n</parameter>\n</tool_call>\n<tool_call>\n<function=g>\n<parameter=s>\nb\n</tool_call>\nDone.",
        Answer(content="Done.", calls=[("f", '{"n": 2}'), ("g", '{"s": "b"}')]),
    ),
    (
        "qwen-xml",
        "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function> oh\n"
        "<function=g>\n</function>\n</tool_call>",
        Answer(content="oh", calls=[("f", '{"n": 1}'), ("g", "{}")]),
    ),
    (
        "qwen-xml",
        "<function=f><parameter=s>\n\n<a>\n</function>; x < <parameter=\n\n</parameter>"
        "<parameter=s>null</parameter></function>",
        Answer(calls=[("f", '{"s": "\\n<a>\\n</function>; x < <parameter=\\n", "s": "null"}')]),
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>",
        Answer(reasoning="Think.", content="Hi."),
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary "
        '<|constrain|>json<|message|>{"a": 1}<|call|>',
        Answer(content="I look.", calls=[("f", '{"a": 1}')]),
    ),
    (
        "harmony",
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
        Answer(calls=[("f", '{"a": 1}')]),
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>A<|start|>assistant<|channel|>analysis<|message|>B<|channel|>final<|message|>C",
        Answer(reasoning="AB", content="C"),
    ),
    ("harmony", "<|channel|>commentary to=python<|message|>1+1<|end|>", Answer(reasoning="1+1")),
    ("harmony", "No channels.", Answer(content="No channels.")),
    ("harmony", "<|channel|>fin", Answer(content="<|channel|>fin")),
    ("harmony without tools", "<|channel|>commentary to=functions.f<|message|>{}", Answer(content="{}")),
    ("qwen3", "<think>\nHm.\n\n</think>\n\nYes.\n", Answer(reasoning="Hm.", content="Yes.\n")),
    ("qwen3", "Yes <think>no</think>", Answer(content="Yes <think>no</think>")),
    (
        "qwen3",
        '<think>Hm</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        Answer(reasoning="Hm", calls=[("f", "{}")]),
    ),
    ("r1", "Hm.\n</think>\n\nYes.", Answer(reasoning="Hm.", content="Yes.")),
    ("r1", "<think>\nHm.", Answer(reasoning="Hm.")),
    ("r1", "Hm.\n", Answer(reasoning="Hm.\n")),
    ("r1", "</think>Yes.", Answer(content="Yes.")),
]


def found(answer: Answer) -> tuple[str, str, list[tuple[str, str]]]:
    return answer.content, answer.reasoning, answer.calls


@pytest.mark.parametrize(("form", "text", "expected"), EXAMPLES)
def test_what_a_model_writes_becomes_answer_reasoning_and_calls(form: str, text: str, expected: Answer) -> None:
    assert found(parse(FORMATS[form], [text])) == found(expected)


CUT: list[tuple[str, str, str]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tr', '{"a": tr'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b", ', '{"a": "b", '),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": Na', '{"a": "Na'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": ["rm -rf /ho', '{"a": ["rm -rf /ho'),
    ("deepseek", CALLS_BEGIN + '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": {', '{"a": {'),
    ("llama", '{"name": "f", "parameters": {', "{"),
    ("llama", "[f(a='x', b='y", '{"a": "x"'),
    ("harmony", '<|channel|>commentary to=functions.f<|message|>{"a": 12', '{"a": 12'),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>", ""),
    ("qwen-xml", "<tool_call><function=f><parameter=s>\nrm -rf /ho", '{"s": "rm -rf /ho'),
    ("qwen-xml", "<tool_call><function=f><parameter=n>\n12", '{"n": 12'),
    ("qwen-xml", "<tool_call><function=f><parameter=n>\n12\n</parameter>\n", '{"n": 12'),
    ("qwen-xml", "<tool_call><function=f><parameter=o>\n{'a': [1, ", '{"o": {"a": [1,'),
]


@pytest.mark.parametrize(("form", "text", "arguments"), CUT)
def test_a_call_that_the_limit_of_tokens_cut_off_stays_open(form: str, text: str, arguments: str) -> None:
    assert parse(FORMATS[form], [text], cut=True).calls == [("f", arguments)]
    assert parse(FORMATS[form], list(text), cut=True).calls == [("f", arguments)]


@pytest.mark.parametrize(
    ("form", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"n": 1}'),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {"n": 1}}'),
        ("qwen-xml", "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"),
        ("deepseek", CALLS_BEGIN + V3_CALL.format("f", '{"n": 1}') + CALLS_END),
    ],
    ids=("hermes", "mistral", "llama", "qwen-xml", "deepseek"),
)
def test_no_piece_of_a_tag_that_the_limit_cut_off_is_content(form: str, call: str) -> None:
    text = f"{call}\n{call}"
    for end in range(len(text)):
        answer = parse(FORMATS[form], [text[:end]], cut=True)
        assert not (answer.calls and answer.content), (text[:end], answer)


def test_what_follows_a_call_and_its_content_stays_when_the_limit_cuts_it_off() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\nNow 1 <'
    assert parse(FORMATS["hermes"], list(text), cut=True).content == "Now 1 <"


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(EXAMPLES), st.lists(st.integers(0, 400), max_size=30))
def test_cuts_change_nothing(example: tuple[str, str, Answer], places: list[int]) -> None:
    form, text, expected = example
    assert found(parse(FORMATS[form], cut(text, places))) == found(expected)


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": ', '"parameters": ', "{", "}", '"a": 1', ", ",
        "[", "]", "[TOOL_CALLS]", "[ARGS]", "f", "(", ")", "a='x'", "; ", "\n", " ", "text", '"', "\\", "<think>",
        "</think>", "<|python_tag|>", CALLS_BEGIN, CALLS_END, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json\n",
        "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "analysis", "final", "commentary to=functions.f",
        "<|call|>", "é", "<", "<|", "<function=f>", "<parameter=n>", "</parameter>", "</function>",
        "<parameter=o>", "NaN", "1e999", "'", ":", "null", "\\ud83d", "\x01", "True", "<function=g>", "```",
        "<｜tool▁call▁end｜>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_sep>", "<tool_calls>",
        "</tool_calls>", "<longcat_tool_call>", "</longcat_tool_call>", "<longcat_arg_key>n</longcat_arg_key>",
        "<longcat_arg_value>", "</longcat_arg_value>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
        "functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<minimax:tool_call>",
        "</minimax:tool_call>", '<invoke name="f">', '<parameter name="n">', "</invoke>", "<seed:tool_call>",
        "</seed:tool_call>", "<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>",
        '<｜DSML｜parameter name="n" string="false">', "</｜DSML｜parameter>", "<|tool_call|>", "<|/tool_call|>",
        "functools", "```tool_code\n", "print(", "<start_function_call>", "call:f{", "n:", "<escape>",
        "<end_function_call>", "<|tool_call>", '<|"|>', "<tool_call|>", "<answer>", "</answer>",
    ]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.lists(FRAGMENTS, max_size=14), st.lists(st.integers(0, 200), max_size=20))
def test_cuts_change_nothing_in_any_mixture_of_markers(form: str, fragments: list[str], places: list[int]) -> None:
    text = "".join(fragments)
    whole = parse(FORMATS[form], [text])
    assert found(parse(FORMATS[form], cut(text, places))) == found(whole)
    assert found(parse(FORMATS[form], list(text))) == found(whole)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(FRAGMENTS, max_size=14),
    st.lists(st.integers(0, 200), max_size=20),
    st.booleans(),
)
def test_arguments_are_valid_json_once_the_model_has_ended(
    form: str, fragments: list[str], places: list[int], broken: bool
) -> None:
    text = (BEGINNINGS.get(form, "") if broken else "") + "".join(fragments)
    whole = parse(FORMATS[form], [text])
    for _, arguments in whole.calls:
        json.loads(arguments, parse_constant=not_json)
        arguments.encode()
    for cut_off in (False, True):
        pieces = cut(text, places)
        assert found(parse(FORMATS[form], pieces, cut=cut_off)) == found(parse(FORMATS[form], [text], cut=cut_off))


BEGINNINGS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": ',
    "qwen3": '<tool_call>{"name": "f", "arguments": {"a": ',
    "mistral": "[TOOL_CALLS]f[ARGS]{",
    "deepseek": CALLS_BEGIN + "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
    "r1": "</think>" + CALLS_BEGIN + "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
    "llama": "[f(a=",
    "harmony": "<|channel|>commentary to=functions.f<|message|>",
    "qwen-xml": "<tool_call><function=f><parameter=n>",
    "glm": "<tool_call>f\n<arg_key>n</arg_key><arg_value>",
    "hunyuan": "<tool_calls><tool_call>f<tool_sep><arg_key>s</arg_key><arg_value>",
    "longcat-pairs": "<longcat_tool_call>f\n<longcat_arg_key>o</longcat_arg_key><longcat_arg_value>{",
    "longcat": '<longcat_tool_call>{"name": "f", "arguments": {"a": ',
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{",
    "minimax-m2": '<minimax:tool_call><invoke name="f"><parameter name="n">',
    "deepseek-v3.2": '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="o" string="false">{',
    "seed-oss": "<seed:tool_call><function=f><parameter=s>",
    "granite": '<|tool_call|>[{"name": "f", "arguments": {',
    "hunyuan-a13b": '<tool_calls>[{"name": "f", "arguments": {',
    "phi-4": '<|tool_call|>[{"name": "f", "arguments": {',
    "phi-4-functools": 'functools[{"name": "f", "arguments": {',
    "xlam": '[{"name": "f", "arguments": {',
    "functiongemma": "<start_function_call>call:f{o:{a:<escape>",
    "gemma-4": '<|tool_call>call:f{n:1,s:<|"|>',
    "tool-code": "```tool_code\nf(a=",
    "answer": "</think><answer>",
}


def not_json(constant: str) -> object:
    raise AssertionError(constant)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["hermes", "mistral", "deepseek", "llama", "qwen-xml", *FAMILIES]),
    st.lists(FRAGMENTS, max_size=14),
)
def test_text_without_a_call_is_lost_in_no_family(form: str, fragments: list[str]) -> None:
    text = "".join(fragments)
    answer = parse(FORMATS[form], [text])
    if not answer.calls:
        assert answer.content == text


@pytest.mark.parametrize("form", ["hermes", "llama"])
def test_a_calls_name_comes_before_its_arguments_which_come_in_pieces(form: str) -> None:
    text = {
        "hermes": '<tool_call>{"name": "f", "arguments": {"city": "Paris"}}</tool_call>',
        "llama": '{"name": "f", "parameters": {"city": "Paris"}}',
    }[form]
    parser = FormatParser(FORMATS[form], Collector(str, one_call=False))
    calls = [call for character in text for delta in parser.push(character) for call in delta.tool_calls]
    assert (calls[0].name, calls[0].id, calls[0].arguments) == ("f", "0", "")
    assert len(calls) > 10
    assert "".join(call.arguments for call in calls) == '{"city": "Paris"}'


def test_without_parallel_calls_only_the_first_one_counts() -> None:
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>'
    assert parse(hermes, [text], one_call=True).calls == [("f", "{}")]


def test_a_long_call_is_read_in_time_that_grows_with_its_length() -> None:
    arguments = json.dumps({"text": "word " * 20_000})
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    pieces = [text[start : start + 5] for start in range(0, len(text), 5)]
    assert parse(hermes, pieces).calls == [("f", arguments)]


@pytest.mark.parametrize(
    ("prompt", "header"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", None),
        (
            "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>The",
            "<|start|>assistant<|channel|>final",
        ),
        ("<|start|>user<|message|>Hi<|end|>", None),
    ],
)
def test_a_prompt_may_end_within_a_message(prompt: str, header: str | None) -> None:
    assert opened_header(prompt) == header
    if header is not None:
        assert parse(harmony(header, tools=True), [" end.<|return|>"]).content == " end."
