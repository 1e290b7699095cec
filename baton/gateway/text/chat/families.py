"""The table of model families, which differ in how they write tool calls.

A checkpoint's template determines the family, since it shows the model the format. If the template does not tell,
`model_type` of config.json does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from baton.gateway.text.chat import constraints
from baton.gateway.text.chat.constraints import Forced, Lark
from baton.gateway.text.chat.parsing import calls
from baton.gateway.text.chat.parsing.argument_types import Schemas
from baton.gateway.text.chat.parsing.parser import Read, ReasoningMarkers
from baton.gateway.text.chat.parsing.xml_call import xml_calls

NO_MARKS: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatFamily:
    """A chat format: how answers are parsed, and how calls are forced.

    Attributes:
        name: for display.
        read: returns the format's reader, given the schemas of arguments by tool name.
        force: returns the grammar of forced calls.
        marks: texts that the reader looks for.
        end_tokens: special tokens that end an answer.
        bare: calls have no marker, and text is a call if it names a tool.
        short_ids: ids of calls have nine letters and digits, because the template requires that.
    """

    name: str
    read: Callable[[Schemas], Read]
    force: Callable[[Lark, Forced], str]
    marks: tuple[str, ...] = NO_MARKS
    end_tokens: tuple[str, ...] = NO_MARKS
    bare: bool = False
    short_ids: bool = False


def _any_tools(read: Read) -> Callable[[Schemas], Read]:
    return lambda _: read


LLAMA_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>")
DEEPSEEK_MARKS = (
    calls.CALLS_BEGIN, calls.CALL_BEGIN, calls.SEPARATOR, calls.CALL_END, calls.CALLS_END,
)  # fmt: skip
HARMONY_MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>")

HARMONY = ChatFamily(
    "harmony",
    _any_tools(calls.content_only),  # made for each prompt: see ChatModel
    constraints.harmony_calls,
    HARMONY_MARKS,
    ("<|return|>", "<|call|>"),
)
MISTRAL_NAMED = ChatFamily(
    "mistral", _any_tools(calls.mistral), constraints.mistral_named_calls, ("[TOOL_CALLS]", "[ARGS]"), short_ids=True
)
MISTRAL_ARRAY = ChatFamily(
    "mistral-array", _any_tools(calls.mistral), constraints.mistral_array_calls, ("[TOOL_CALLS]",), short_ids=True
)
DEEPSEEK_FENCED = ChatFamily(
    "deepseek-v3", _any_tools(calls.deepseek), partial(constraints.deepseek_calls, fenced=True), DEEPSEEK_MARKS
)
DEEPSEEK = ChatFamily(
    "deepseek-v3.1", _any_tools(calls.deepseek), partial(constraints.deepseek_calls, fenced=False), DEEPSEEK_MARKS
)
HERMES = ChatFamily(
    "hermes", _any_tools(calls.hermes), constraints.hermes_calls, ("<tool_call>", "</tool_call>"), ("<|im_end|>",)
)
QWEN_XML = ChatFamily("qwen-xml", xml_calls, constraints.xml_calls, ("<tool_call>", "</tool_call>"), ("<|im_end|>",))
LLAMA_PYTHONIC = ChatFamily(
    "llama-pythonic",
    calls.llama,
    constraints.pythonic_calls,
    (*calls.PYTHON_TAGS, calls.PYTHON_END),
    LLAMA_ENDS,
    bare=True,
)
LLAMA = ChatFamily("llama", calls.llama, constraints.llama_calls, calls.PYTHON_TAGS, LLAMA_ENDS, bare=True)
UNKNOWN = ChatFamily("unknown", _any_tools(calls.content_only), constraints.llama_calls, bare=True)


def family_of(template: str, model_type: str) -> ChatFamily:
    """Returns the first family of the table whose marks the template contains."""
    table: tuple[tuple[ChatFamily, bool], ...] = (
        (HARMONY, "<|channel|>" in template and "<|message|>" in template),
        (MISTRAL_NAMED, "[TOOL_CALLS]" in template and "[ARGS]" in template),
        (MISTRAL_ARRAY, "[TOOL_CALLS]" in template),
        (DEEPSEEK_FENCED, calls.CALLS_BEGIN in template and "```json" in template),
        (DEEPSEEK, calls.CALLS_BEGIN in template),
        (QWEN_XML, "<tool_call>" in template and "<parameter=" in template),
        (HERMES, "<tool_call>" in template and "<arg_key>" not in template),  # GLM's format is not read
        (LLAMA_PYTHONIC, "<|python_start|>" in template or "[func_name1(" in template),
        (LLAMA, "<|python_tag|>" in template or '"parameters": dictionary' in template),
        (LLAMA, "<|start_header_id|>" in template and '"parameters"' in template),
        (HARMONY, model_type == "gpt_oss"),
        (LLAMA, model_type == "llama4"),
    )
    return next((family for family, here in table if here), UNKNOWN)


REASONING = (ReasoningMarkers("<think>", "</think>"), ReasoningMarkers("[THINK]", "[/THINK]"))


def reasoning_of(template: str) -> ReasoningMarkers | None:
    """Returns the markers that the template writes around reasoning or cuts reasoning at; None if it has none."""
    return next((markers for markers in REASONING if markers.close in template), None)
