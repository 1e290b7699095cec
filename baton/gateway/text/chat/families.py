"""The table of model families, which differ in how they write tool calls.

The template determines a checkpoint's family and its markers of reasoning, since it shows the model the format. If the
template does not tell, `model_type` of config.json does.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from baton.gateway.text.chat import forced_json, forced_markup
from baton.gateway.text.chat.constraints import Forced, Lark
from baton.gateway.text.chat.parsing import deepseek, kimi, llama, xml_call
from baton.gateway.text.chat.parsing.argument_types import Schemas
from baton.gateway.text.chat.parsing.call_list import content_only
from baton.gateway.text.chat.parsing.deepseek import CALLS_BEGIN
from baton.gateway.text.chat.parsing.gemma_call import FUNCTION_GEMMA, GEMMA_4, GemmaMarkup, gemma_calls
from baton.gateway.text.chat.parsing.kimi import SECTION
from baton.gateway.text.chat.parsing.mistral import mistral
from baton.gateway.text.chat.parsing.pair_call import GLM, HUNYUAN, LONGCAT, PairMarkup, pair_calls
from baton.gateway.text.chat.parsing.parser import Read, ReasoningMarkers
from baton.gateway.text.chat.parsing.tagged_json import hermes, tagged_json
from baton.gateway.text.chat.parsing.tool_code import FENCE, tool_code
from baton.gateway.text.chat.parsing.xlam import TAGS, xlam
from baton.gateway.text.chat.parsing.xml_call import XmlMarkup, xml_calls

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
        ids: the form of calls' ids; a template may require nine letters and digits, or the function's name.
    """

    name: str
    read: Callable[[Schemas], Read]
    force: Callable[[Lark, Forced], str]
    marks: tuple[str, ...] = NO_MARKS
    end_tokens: tuple[str, ...] = NO_MARKS
    bare: bool = False
    ids: Literal["random", "short", "named"] = "random"


def _any_tools(read: Read) -> Callable[[Schemas], Read]:
    return lambda _: read


def _tagged(name: str, open: str, close: str, *ends: str) -> ChatFamily:
    """Returns a family whose calls are objects in a tag each."""
    read, force = tagged_json(close, open), partial(forced_json.tagged_calls, open=open, close=close)
    return ChatFamily(name, _any_tools(read), force, (open, close), ends)


def _array(name: str, open: str, close: str, *ends: str, also: tuple[str, ...] = ()) -> ChatFamily:
    """Returns a family whose calls are one array after a text; `also`: others that the model may write instead."""
    read, force = tagged_json(close, open, *also), partial(forced_json.array_calls, open=open, close=close)
    return ChatFamily(name, _any_tools(read), force, tuple(filter(None, (open, *also, close))), ends)


def _xml(name: str, markup: XmlMarkup, *ends: str) -> ChatFamily:
    return ChatFamily(
        name,
        partial(xml_calls, markup=markup),
        partial(forced_markup.xml_calls, markup=markup),
        markup.tags,
        ends,
    )


def _pairs(name: str, markup: PairMarkup, *ends: str) -> ChatFamily:
    return ChatFamily(
        name,
        partial(pair_calls, markup=markup),
        partial(forced_markup.pair_calls, markup=markup),
        markup.tags,
        ends,
    )


def _gemma(name: str, markup: GemmaMarkup, *ends: str) -> ChatFamily:
    return ChatFamily(
        name,
        partial(gemma_calls, markup=markup),
        partial(forced_markup.gemma_calls, markup=markup),
        markup.tags,
        ends,
    )


LLAMA_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>")
HARMONY_MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>")

HARMONY = ChatFamily(
    "harmony",
    _any_tools(content_only),  # made for each prompt: see `Dialect.reader`
    forced_json.harmony_calls,
    HARMONY_MARKS,
    ("<|return|>", "<|call|>"),
)
MISTRAL_NAMED = ChatFamily(
    "mistral", _any_tools(mistral), forced_json.mistral_named_calls, ("[TOOL_CALLS]", "[ARGS]"), ids="short"
)
MISTRAL_ARRAY = ChatFamily(
    "mistral-array",
    _any_tools(mistral),
    partial(forced_json.array_calls, open="[TOOL_CALLS]", space=True),
    ("[TOOL_CALLS]",),
    ids="short",
)
DEEPSEEK_FENCED = ChatFamily(
    "deepseek-v3",
    _any_tools(deepseek.deepseek),
    partial(forced_json.deepseek_calls, fenced=True),
    deepseek.ALL_MARKS,
)
DEEPSEEK = ChatFamily(
    "deepseek-v3.1",
    _any_tools(deepseek.deepseek),
    partial(forced_json.deepseek_calls, fenced=False),
    deepseek.ALL_MARKS,
)
DEEPSEEK_DSML = _xml("deepseek-v3.2", xml_call.DSML)
DEEPSEEK_V4 = _xml("deepseek-v4", xml_call.DSML_V4)
HERMES = ChatFamily(
    "hermes", _any_tools(hermes), forced_json.hermes_calls, ("<tool_call>", "</tool_call>"), ("<|im_end|>",)
)
QWEN_XML = _xml("qwen-xml", xml_call.QWEN, "<|im_end|>")
SEED_OSS = _xml("seed-oss", xml_call.SEED, "<seed:eos>")
MINIMAX = _xml("minimax-m2", xml_call.MINIMAX, "[e~[")
GLM_PAIRS = _pairs("glm", GLM, "<|observation|>", "<|user|>")
HUNYUAN_PAIRS = _pairs("hunyuan", HUNYUAN)
HUNYUAN_ARRAY = _array("hunyuan-a13b", "<tool_calls>", "</tool_calls>", "<|eos|>")
LONGCAT_PAIRS = _pairs("longcat-pairs", LONGCAT, "</longcat_s>")
LONGCAT_JSON = _tagged("longcat", "<longcat_tool_call>", "</longcat_tool_call>", "</longcat_s>")
KIMI = ChatFamily(
    "kimi-k2", _any_tools(kimi.kimi), forced_json.kimi_calls, kimi.ALL_MARKS, ("<|im_end|>",), ids="named"
)
GRANITE = _array("granite", "<|tool_call|>", "", "<|end_of_text|>", also=("<tool_call>",))
PHI_4 = _array("phi-4", "<|tool_call|>", "<|/tool_call|>", "<|end|>", also=("functools",))
PHI_4_FUNCTOOLS = _array("phi-4-functools", "functools", "", "<|end|>", also=("<|tool_call|>",))
XLAM = ChatFamily("xlam", xlam, forced_json.array_calls, TAGS.markers, ("<|eot_id|>", "<|im_end|>"), bare=True)
FUNCTION_GEMMA_CALLS = _gemma("functiongemma", FUNCTION_GEMMA, "<start_function_response>", "<end_of_turn>")
GEMMA_4_CALLS = _gemma("gemma-4", GEMMA_4, "<|tool_response>", "<turn|>")
TOOL_CODE = ChatFamily("tool-code", tool_code, forced_markup.tool_code_calls, (FENCE,), ("<end_of_turn>",))
LLAMA_PYTHONIC = ChatFamily(
    "llama-pythonic",
    llama.llama,
    forced_markup.pythonic_calls,
    (*llama.PYTHON_TAGS, llama.PYTHON_END),
    LLAMA_ENDS,
    bare=True,
)
LLAMA = ChatFamily("llama", llama.llama, forced_json.llama_calls, llama.PYTHON_TAGS, LLAMA_ENDS, bare=True)
UNKNOWN = ChatFamily("unknown", _any_tools(content_only), forced_json.llama_calls, bare=True)


# The first family counts whose texts are all in the template.
SHOWN: tuple[tuple[ChatFamily, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    (MISTRAL_NAMED, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL_ARRAY, ("[TOOL_CALLS]",)),
    (DEEPSEEK_DSML, ("｜DSML｜", "function_calls>")),
    (DEEPSEEK_V4, ("｜DSML｜",)),
    (DEEPSEEK_FENCED, (CALLS_BEGIN, "```json")),
    (DEEPSEEK, (CALLS_BEGIN,)),
    (KIMI, (SECTION,)),
    (KIMI, ("<|im_system|>tool_declare",)),
    (MINIMAX, ("<minimax:tool_call>",)),
    (SEED_OSS, ("<seed:tool_call>",)),
    (LONGCAT_PAIRS, ("<longcat_arg_key>",)),
    (LONGCAT_JSON, ("<longcat_tool_call>",)),
    (HUNYUAN_PAIRS, ("<tool_sep>", "<arg_key>")),
    (GLM_PAIRS, ("<tool_call>", "<arg_key>")),
    (HUNYUAN_ARRAY, ("<tool_calls>",)),
    (QWEN_XML, ("<tool_call>", "<parameter=")),
    (GRANITE, ("<|tool_call|>", "<|start_of_role|>")),
    (PHI_4_FUNCTOOLS, ("functools[",)),
    (PHI_4, ("<|tool_call|>",)),
    (PHI_4, ("<|tool|>", "<|/tool|>")),
    (XLAM, ('[{"name": "tool_call_name"',)),
    (FUNCTION_GEMMA_CALLS, ("<start_function_call>",)),
    (GEMMA_4_CALLS, ("<|tool_call>",)),
    (TOOL_CODE, ("```tool_code",)),
    (HERMES, ("<tool_call>",)),
    (GRANITE, ("available_tools", "<|start_of_role|>")),
    (LLAMA_PYTHONIC, ("<|python_start|>",)),
    (LLAMA_PYTHONIC, ("[func_name1(",)),
    (LLAMA, ("<|python_tag|>",)),
    (LLAMA, ('"parameters": dictionary',)),
    (LLAMA, ("<|start_header_id|>", '"parameters"')),
)
OF_MODEL_TYPE = {"gpt_oss": HARMONY, "llama4": LLAMA, "kimi_k2": KIMI}

REASONING = (
    ReasoningMarkers("<think>", "</think>"),
    ReasoningMarkers("[THINK]", "[/THINK]"),
    ReasoningMarkers("<seed:think>", "</seed:think>"),
    ReasoningMarkers("<longcat_think>", "</longcat_think>"),
    ReasoningMarkers("◁think▷", "◁/think▷"),
    ReasoningMarkers("<|channel>thought", "<channel|>"),
    ReasoningMarkers("Here is my thought process:", "Here is my response:"),
)
ANSWERS = (("<answer>", "</answer>"), ("<response>", "</response>"))


def family_of(template: str, model_type: str) -> ChatFamily:
    """Returns the family whose calls a template shows to the model, or `UNKNOWN`."""
    for family, texts in SHOWN:
        if all(text in template for text in texts):
            return family
    return OF_MODEL_TYPE.get(model_type, UNKNOWN)


def reasoning_of(template: str) -> ReasoningMarkers | None:
    """Returns the markers that the template writes around reasoning or cuts reasoning at; None if it has none."""
    found = next((markers for markers in REASONING if markers.close in template), None)
    # MiniMax's template has the tag `response` around the results of tools.
    if found is None or "<minimax:tool_call>" in template:
        return found
    answer = next((tags for tags in ANSWERS if all(tag in template for tag in tags)), None)
    return found if answer is None else replace(found, answer=answer)
