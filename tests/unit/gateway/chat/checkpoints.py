"""Small checkpoints with a template of each family, and grammars followed over their tokenizers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from baton.core.types import Grammar, GrammarKind
from baton.gateway.text.chat.model import ChatModel, read_chat_model
from baton.settings.config import DEMO_MODELS
from tests.unit.gateway.chat import family_formats

LOOP = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TOOLS = "{{ tools | tojson if tools }}"
ASKS = "{% if add_generation_prompt %}<assistant>{% endif %}"
TEMPLATES = {
    "plain": LOOP + ASKS,
    "unknown": TOOLS + LOOP + ASKS,
    "llama": TOOLS + "{# <|python_tag|> #}" + LOOP + ASKS,
    "llama-pythonic": TOOLS + "{# <|python_start|> #}" + LOOP + ASKS,
    "hermes": TOOLS + "{# <tool_call> #}" + LOOP + ASKS,
    "qwen-xml": TOOLS + "{# <tool_call> <parameter= #}" + LOOP + ASKS,
    "qwen3": TOOLS
    + "{# <tool_call> #}"
    + LOOP
    + "{% if add_generation_prompt %}<assistant>"
    + "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "mistral": TOOLS + "{# [TOOL_CALLS] [ARGS] #}" + LOOP,
    "mistral-array": TOOLS + "{# [TOOL_CALLS] #}" + LOOP,
    "deepseek-v3": TOOLS + "{# <｜tool▁calls▁begin｜> ```json #}" + LOOP + "<｜Assistant｜>",
    "deepseek-v3.1": TOOLS + "{# <｜tool▁calls▁begin｜> #}" + LOOP + "<｜Assistant｜>",
    "r1": TOOLS + "{# <｜tool▁calls▁begin｜> ```json </think> #}" + LOOP + "<｜Assistant｜><think>\n",
    "harmony": TOOLS + "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    **family_formats.TEMPLATES,
}
SPECIAL = (
    "<|python_tag|>", "<|python_start|>", "<|python_end|>", "<|eot_id|>", "[TOOL_CALLS]", "[ARGS]", "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>",
    *family_formats.SPECIAL,
)  # fmt: skip
TEXTS = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    *family_formats.ADDED,
)  # added tokens that are not special ones, as in Qwen3


@cache
def tokenizer(*, special: bool = True) -> Tokenizer:
    made = Tokenizer.from_file(str(DEMO_MODELS / "llama" / "tokenizer.json"))
    if special:
        made.add_special_tokens(list(SPECIAL))
        made.add_tokens([AddedToken(text, special=False) for text in TEXTS])
    return made


def write_checkpoint(directory: Path, template: str, **config: Any) -> None:
    tokenizer().save(str(directory / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps({**tokens, **config}))


def chat_model(directory: Path, family: str) -> ChatModel:
    write_checkpoint(directory, TEMPLATES[family])
    return read_chat_model(directory, None)


@cache
def _grammar_tokenizer(*, special: bool) -> LLTokenizer:
    return LLTokenizer(tokenizer(special=special).to_str(), eos_token=4095)


@dataclass(frozen=True)
class Followed:
    """What a grammar makes of a text: up to where it was accepted, and whether the output may end there."""

    accepted: str
    complete: bool


def follow(grammar: Grammar, text: str, *, special: bool = True) -> Followed:
    assert grammar.kind is GrammarKind.LARK
    matcher = LLMatcher(_grammar_tokenizer(special=special), grammar.text)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer(special=special).encode(text, add_special_tokens=False).ids
    count = matcher.validate_tokens(ids)
    matcher.consume_tokens(ids[:count])
    accepted = tokenizer(special=special).decode(ids[:count], skip_special_tokens=False)
    return Followed(accepted, count == len(ids) and matcher.is_accepting())


def tool(name: str, parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}
