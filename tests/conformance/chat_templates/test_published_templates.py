"""Prompts are those of transformers' `apply_chat_template`, text and token ids, for published templates.

Each template is rendered for each conversation by both. Where transformers raises, Baton either refuses too or renders
what the template's author meant (content in parts for templates of strings, tool calls without content).
"""

import copy
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from baton.core.errors import InvalidRequest
from baton.gateway.text.chat.model import read_chat_model
from baton.gateway.text.chat.types import ChatRequest, NamedTool
from baton.settings.config import DEMO_MODELS
from tests.conformance.chat_templates.published import TEMPLATES, template

MARKER = re.compile(
    r"<\|[^<>|'\"{}\s]+\|>|<｜[^<>'\"]+｜>|\[/?[A-Z_]{3,}\]|</?think>|</?tool_call>|<(?:start|end)_of_turn>"
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": 'Weather <now> & "later" é', "parameters": PARAMETERS},
    },
    {"type": "function", "function": {"name": "clock", "description": "The time", "parameters": {"type": "object"}}},
]


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str, arguments: dict[str, Any], call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


PARIS = call("weather", {"city": "Paris é <b>", "days": 2}, "abcdefghi")
CLOCK = call("clock", {}, "ABCDEFGHI")
RESULT = turn("tool", '{"t": 20}', tool_call_id="abcdefghi", name="weather")
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one message": {"messages": [turn("user", "Hello <b>there</b>  ")]},
    "system": {"messages": [turn("system", " Be brief. "), turn("user", "Hi\n")]},
    "turns": {
        "messages": [
            turn("system", "Be brief."),
            turn("user", "Hi"),
            turn("assistant", " Hello! "),
            turn("user", "Bye é 日本"),
        ]
    },
    "no generation prompt": {
        "messages": [turn("user", "Hi"), turn("assistant", "Hello")],
        "add_generation_prompt": False,
    },
    "continued": {"messages": [turn("user", "Hi"), turn("assistant", "The answer")], "continue_final_message": True},
    "continued after a space": {
        "messages": [turn("user", "Hi"), turn("assistant", "The answer is ")],
        "continue_final_message": True,
    },
    "tools": {"messages": [turn("user", "Weather?")], "tools": TOOLS},
    "tools and system": {"messages": [turn("system", "Be brief."), turn("user", "Weather?")], "tools": TOOLS},
    "call": {"messages": [turn("user", "Weather?"), turn("assistant", "", tool_calls=[PARIS]), RESULT], "tools": TOOLS},
    "call without content": {
        "messages": [
            turn("user", "Weather?"),
            turn("assistant", None, tool_calls=[PARIS]),
            RESULT,
            turn("assistant", "It is 20."),
            turn("user", "Thanks"),
        ],
        "tools": TOOLS,
    },
    "two calls": {
        "messages": [
            turn("user", "Weather?"),
            turn("assistant", "Looking.", tool_calls=[PARIS, CLOCK]),
            RESULT,
            turn("tool", "12:00", tool_call_id="ABCDEFGHI", name="clock"),
        ],
        "tools": TOOLS,
    },
    "reasoning": {
        "messages": [turn("user", "1+1?"), turn("assistant", "2", reasoning_content="One and one."), turn("user", "?")]
    },
    "reasoning in the text": {
        "messages": [turn("user", "1+1?"), turn("assistant", "<think>\nhm\n</think>\n\n2"), turn("user", "?")]
    },
    "thinking off": {"messages": [turn("user", "1+1?")], "template_kwargs": {"enable_thinking": False}},
    "thinking on": {"messages": [turn("user", "1+1?")], "template_kwargs": {"enable_thinking": True, "thinking": True}},
    "documents": {
        "messages": [turn("user", "Read")],
        "template_kwargs": {"documents": [{"title": "T", "text": "Body"}]},
    },
    "parts": {"messages": [turn("user", [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}])]},
}


@cache
def tokenizer(name: str) -> Tokenizer:
    """The demo models' tokenizer with the template's markers as special tokens, which by itself puts BOS first."""
    made = Tokenizer.from_file(str(DEMO_MODELS / "llama" / "tokenizer.json"))
    made.add_special_tokens(["<s>", "</s>", *sorted(set(MARKER.findall(template(name))))])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


@cache
def reference(name: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(name), bos_token="<s>", eos_token="</s>", chat_template=template(name)
    )


def rendered_by_transformers(name: str, conversation: dict[str, Any], *, tokenize: bool) -> Any:
    """None: transformers refuses."""
    given = copy.deepcopy(conversation)
    continues = given.get("continue_final_message", False)
    try:
        return reference(name).apply_chat_template(
            given["messages"],
            tools=given.get("tools"),
            add_generation_prompt=given.get("add_generation_prompt", not continues),
            continue_final_message=continues,
            tokenize=tokenize,
            return_dict=False,
            **given.get("template_kwargs", {}),
        )
    except Exception:  # noqa: BLE001  (whatever a template raises)
        return None


def as_clients_send_it(conversation: dict[str, Any]) -> ChatRequest:
    """With the arguments of calls as strings. Tools that a template does not take are for forced calls only."""
    given = copy.deepcopy(conversation)
    for message in given["messages"]:
        for one in message.get("tool_calls", ()):
            one["function"]["arguments"] = json.dumps(one["function"]["arguments"], ensure_ascii=False)
    return ChatRequest(**given, tool_choice=NamedTool("weather") if "tools" in given else "auto")


def write_checkpoint(directory: Path, name: str) -> None:
    tokenizer(name).save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template(name)}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


# Templates that write a call's arguments as a string: the reference gets strings as well.
WANT_STRINGS = {"DeepSeek V3", "DeepSeek V3 0324", "DeepSeek R1 distilled"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, name)
    model = read_chat_model(tmp_path, None)
    text_tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    agreed = 0
    for title, conversation in CONVERSATIONS.items():
        request = as_clients_send_it(conversation)
        wanted_of = dict(conversation, messages=request.messages) if name in WANT_STRINGS else conversation
        wanted = rendered_by_transformers(name, wanted_of, tokenize=False)
        if wanted is None:
            continue
        if title == "parts" and "'type': 'text'" in wanted:
            continue  # the template writes the list as Python prints it
        prompt = model.prepare(request).prompt
        assert prompt == wanted, title
        ids = text_tokenizer.encode(prompt, add_special_tokens=False).ids
        assert ids == rendered_by_transformers(name, wanted_of, tokenize=True), title
        assert prompt.count("<s>") <= prompt.count("[INST]") + 1
        agreed += 1
    assert agreed >= 9


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_transformers_refuses_is_refused_or_rendered_whole(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, name)
    model = read_chat_model(tmp_path, None)
    for conversation in CONVERSATIONS.values():
        if rendered_by_transformers(name, conversation, tokenize=False) is not None:
            continue
        request = as_clients_send_it(conversation)
        try:
            prompt = model.prepare(request).prompt
        except InvalidRequest:
            continue
        for message in conversation["messages"]:
            content = message["content"]
            texts = [content] if isinstance(content, str) else [part["text"] for part in content or ()]
            assert all(text.strip() in prompt for text in texts)
