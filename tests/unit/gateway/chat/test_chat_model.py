"""A checkpoint's templates, and conversations prepared with them."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.errors import ConfigError, InvalidRequest
from baton.gateway.text.chat.families import family_of
from baton.gateway.text.chat.json_request import chat_request
from baton.gateway.text.chat.model import ChatModel, read_chat_model
from baton.gateway.text.chat.types import ChatRequest, NamedTool
from baton.settings.config import DEMO_MODELS
from tests.unit.gateway.chat.checkpoints import ASKS, LOOP, TEMPLATES, chat_model, tokenizer, tool, write_checkpoint
from tests.unit.gateway.chat.outputs import answer_of

USER = [{"role": "user", "content": "Hi"}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}


def model_of(directory: Path, template: str) -> ChatModel:
    write_checkpoint(directory, template)
    return read_chat_model(directory, None)


def prompt(model: ChatModel, messages: Any = USER, **request: Any) -> str:
    return model.prepare(ChatRequest(messages, **request)).prompt


def refused(model: ChatModel, messages: Any = USER, **request: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        model.prepare(ChatRequest(messages, **request))
    return caught.value


def test_templates_come_from_the_config_by_name(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools | length }}"}]
    write_checkpoint(tmp_path, "", chat_template=named)
    model = read_chat_model(tmp_path, None)
    assert prompt(model) == "D"
    assert prompt(model, tools=[tool("f")]) == "T1"
    assert prompt(model, tools=[tool("f")], tool_choice="none") == "D"
    assert prompt(model, tools=[tool("f")], template="default", tool_choice=NamedTool("f")) == "D"
    assert refused(model, template="other").allowed == ("default", "tool_use")


def test_files_of_templates_take_the_place_of_the_configs(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "config")
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("{{ documents[0].text }}")
    model = read_chat_model(tmp_path, None)
    assert prompt(model) == "file"
    assert prompt(model, template="rag", template_kwargs={"documents": [{"text": "x"}]}) == "x"
    (tmp_path / "mine.jinja").write_text("mine")
    assert prompt(read_chat_model(tmp_path, tmp_path / "mine.jinja")) == "mine"


def test_a_checkpoint_may_have_no_template(tmp_path: Path) -> None:
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    model = read_chat_model(tmp_path, None)
    assert not model.has_template
    assert refused(model).field == "messages"


@pytest.mark.parametrize("name", ["none.jinja", "broken.jinja", "bytes.jinja"])
def test_a_template_file_that_is_none_is_refused_at_start(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "config")
    (tmp_path / "broken.jinja").write_text("{% for %}")
    (tmp_path / "bytes.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError):
        read_chat_model(tmp_path, tmp_path / name)


def test_special_tokens_are_variables(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "{{ bos_token }}{{ eos_token }}", eos_token={"content": "</s>"}, pad_token=None)
    assert prompt(read_chat_model(tmp_path, None)) == "<s></s>"
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<b>"}}))
    assert prompt(read_chat_model(tmp_path, None)) == "<b></s>"
    assert prompt(read_chat_model(tmp_path, None), template_kwargs={"bos_token": ""}) == "</s>"


def test_a_request_brings_no_template_of_its_own(tmp_path: Path) -> None:
    error = refused(chat_model(tmp_path, "plain"), template="{{ messages }}" * 10)
    assert error.field == "chat_template"
    assert error.allowed == ("default",)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__bases__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(_a=1) }}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ range(10000000) | list }}",
        "{{ dict.__class__.__init__.__globals__ }}",
    ],
)
def test_a_template_reaches_nothing_but_its_variables(template: str, tmp_path: Path) -> None:
    refused(model_of(tmp_path, template))


def test_a_template_refuses_in_its_own_words(tmp_path: Path) -> None:
    error = refused(model_of(tmp_path, "{{ raise_exception('roles must alternate') }}"))
    assert error.field == "messages"
    assert "roles must alternate" in str(error)


def test_an_endless_prompt_is_refused(tmp_path: Path) -> None:
    model = model_of(tmp_path, "{% for i in range(9999) %}{{ 'x' * 99999 }}{% endfor %}")
    assert "characters" in str(refused(model))


def test_ranges_within_ranges_are_refused(tmp_path: Path) -> None:
    model = model_of(tmp_path, "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}")
    assert "items together" in str(refused(model))


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        (LOOP, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "<user>a\nb"),
        ("{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}", "a", "[a]"),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m['content'] %}[{{ p['text'] }}]{% endfor %}{% endif %}{% endfor %}",
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "[a][b]",
        ),
    ],
)
def test_contents_have_the_form_that_the_template_takes(
    template: str, content: object, expected: str, tmp_path: Path
) -> None:
    assert prompt(model_of(tmp_path, template), [{"role": "user", "content": content}]) == expected


def test_images_are_refused_by_name(tmp_path: Path) -> None:
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    error = refused(chat_model(tmp_path, "plain"), [{"role": "user", "content": content}])
    assert error.field == "messages[0].content[1].type"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{{ f.arguments | tojson }}", '{"a": "é"}'),
        ("{{ 'x' + f.arguments }}", 'x{"a": "é"}'),
        ("{% for k, v in f.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "a=é"),
        ("{{ f.arguments }}", '{"a": "é"}'),
    ],
)
def test_arguments_of_calls_have_the_form_that_the_template_takes(
    arguments: str, expected: str, tmp_path: Path
) -> None:
    template = (
        "{% for m in messages %}{% for t in m.tool_calls or [] %}{% set f = t.function %}"
        + arguments
        + "{% endfor %}{% endfor %}"
    )
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert prompt(model_of(tmp_path, template), messages) == expected


def test_a_call_without_content_has_an_empty_one_where_the_template_concatenates_it(tmp_path: Path) -> None:
    """SmolLM2's template does, and clients leave out the content of a message that only calls."""
    model = model_of(tmp_path, "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "c", "content": "done"})
    assert prompt(model, turns) == "<user>hi<assistant><tool>done"


def test_a_call_without_content_is_refused_where_the_template_would_lose_its_result(tmp_path: Path) -> None:
    """Phi's templates write no message of a tool, and transformers refuses this conversation too."""
    template = "{% for m in messages if m['role'] != 'tool' %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "c", "content": "done"})
    with pytest.raises(InvalidRequest):
        prompt(model_of(tmp_path, template), turns)


def test_a_developer_is_the_system_where_the_template_knows_none(tmp_path: Path) -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert prompt(model_of(tmp_path, LOOP), messages) == "<system>x"
    assert prompt(model_of(tmp_path, LOOP + "{# developer #}"), messages) == "<developer>x"


def test_the_final_message_is_continued(tmp_path: Path) -> None:
    model = chat_model(tmp_path, "plain")
    messages = [*USER, {"role": "assistant", "content": "The "}]
    assert prompt(model, messages, continue_final_message=True) == "<user>Hi<assistant>The "
    trims = model_of(tmp_path, LOOP.replace("m.content", "m.content | trim") + "</s>" + ASKS)
    assert prompt(trims, messages, continue_final_message=True) == "<user>Hi<assistant>The"
    assert refused(model, messages, continue_final_message=True, add_generation_prompt=True).field
    drops = model_of(tmp_path, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    assert refused(drops, messages, continue_final_message=True).field == "continue_final_message"


def test_the_reasoning_of_a_continued_message_goes_on(tmp_path: Path) -> None:
    model = model_of(tmp_path, LOOP + "{# </think> #}" + ASKS)
    request = ChatRequest([*USER, {"role": "assistant", "content": "<think>One"}], continue_final_message=True)
    answer = answer_of(model.parser(request, model.prepare(request), "seed"), [" and one.</think>2"])
    assert (answer.reasoning, answer.content) == (" and one.", "2")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": NamedTool("g")}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": "required", "continue_final_message": True}, "continue_final_message"),
        ({"template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused(request_: dict[str, Any], field: str, tmp_path: Path) -> None:
    assert refused(chat_model(tmp_path, "hermes"), **request_).field == field


def test_tools_that_the_model_would_never_see_are_refused(tmp_path: Path) -> None:
    assert refused(chat_model(tmp_path, "plain"), tools=[tool("f")]).field == "tools"


def test_hidden_tools_are_neither_rendered_nor_called(tmp_path: Path) -> None:
    model = chat_model(tmp_path, "hermes")
    request = ChatRequest(USER, tools=[tool("f")], tool_choice="none")
    prepared = model.prepare(request)
    assert prepared.prompt == "<user>Hi<assistant>"
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert answer_of(model.parser(request, prepared, "seed"), [text]).content == text


@pytest.mark.parametrize(
    ("family", "tools", "skips"),
    [("mistral", True, False), ("mistral", False, True), ("hermes", True, True), ("harmony", False, False)],
)
def test_special_tokens_stay_in_the_text_where_the_parser_needs_them(
    family: str, tools: bool, skips: bool, tmp_path: Path
) -> None:
    request = ChatRequest(USER, tools=[tool("f")] if tools else [])
    assert chat_model(tmp_path, family).prepare(request).skip_special_tokens is skips


def test_tokens_that_end_a_familys_answers_stop_it(tmp_path: Path) -> None:
    ids = [tokenizer().token_to_id(text) for text in ("<|return|>", "<|call|>")]
    assert list(chat_model(tmp_path, "harmony").prepare(ChatRequest(USER)).stop_token_ids) == ids


def test_ids_of_calls_are_unique_and_made_from_the_seed_and_the_prompt(tmp_path: Path) -> None:
    request = ChatRequest(USER, tools=[tool("f")])
    other = ChatRequest([{"role": "user", "content": "And now?"}], tools=[tool("f")])
    text = {"hermes": '<tool_call>{"name": "f"}</tool_call>' * 2, "mistral": "[TOOL_CALLS]f[ARGS]{}" * 2}
    for family, length in (("hermes", 29), ("mistral", 9)):
        model = chat_model(tmp_path, family)
        ids = [
            call_id
            for asked, seed in ((request, "a"), (request, "a"), (request, "b"), (other, "a"))
            for call_id in answer_of(model.parser(asked, model.prepare(asked), seed), [text[family]]).ids
        ]
        assert ids[:2] == ids[2:4]
        assert len(set(ids)) == 6
        assert {len(call_id) for call_id in ids} == {length}
        assert all(call_id.replace("_", "").isalnum() for call_id in ids)


def test_reasoning_that_is_turned_off_is_not_looked_for(tmp_path: Path) -> None:
    model = chat_model(tmp_path, "qwen3")
    request = ChatRequest(USER, template_kwargs={"enable_thinking": False})
    prepared = model.prepare(request)
    assert prepared.prompt.endswith("</think>\n\n")
    assert answer_of(model.parser(request, prepared, "seed"), ["<think>a</think>"]).content == "<think>a</think>"


@pytest.mark.parametrize("family", sorted(TEMPLATES.keys() - {"plain", "qwen3", "r1", "ernie"}))
def test_a_template_shows_its_family(family: str) -> None:
    assert family_of(TEMPLATES[family], "llama").name == family


@pytest.mark.parametrize(("model_type", "family"), [("gpt_oss", "harmony"), ("llama4", "llama"), ("llama", "unknown")])
def test_the_kind_of_model_shows_its_family_where_the_template_does_not(model_type: str, family: str) -> None:
    assert family_of(LOOP, model_type).name == family


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    model = chat_model(tmp_path, "hermes")
    assert refused(model, [{"role": "user", "content": "a\ud800"}]).field == "messages"
    half = tool("f", {"properties": {"\ud800": {}}})
    assert refused(model, tools=[half], tool_choice="required").field == "messages"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "string", "#/$defs/a", "object", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "properties", "required", "$ref", "enum", "a", "$defs"]), inner)
    ),
    max_leaves=12,
)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    schema=st.dictionaries(st.sampled_from(["type", "properties", "required", "$ref", "$defs"]), JSON),
    content=JSON,
    family=st.sampled_from(["hermes", "qwen-xml", "llama-pythonic", "harmony"]),
)
def test_any_json_is_prepared_or_refused(schema: Any, content: Any, family: str, tmp_path: Path) -> None:
    model = chat_model(tmp_path, family)
    body = {
        "messages": [{"role": "user", "content": content if isinstance(content, list) else "x"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "tool_choice": "required",
    }
    with suppress(InvalidRequest):
        request = chat_request(body)
        prepared = model.prepare(request)
        text = "<tool_call><function=f><parameter=a>x</parameter></function></tool_call>"
        answer_of(model.parser(request, prepared, "seed"), [text])


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_the_models_in_the_box_have_a_template_with_tools(name: str) -> None:
    model = read_chat_model(DEMO_MODELS / name, None)
    assert prompt(model) == "Hi"
    conversation = [
        {"role": "system", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "20"},
    ]
    assert prompt(model, conversation, tools=[tool("f")]) == (
        '{"name": "f"}\n\nBe brief.\n\nHi\n\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>\n\n20'
    )
    request = ChatRequest(USER, tools=[tool("f")])
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert answer_of(model.parser(request, model.prepare(request), "seed"), [text]).calls == [("f", "{}")]
