"""Finds a checkpoint's family and its markers of reasoning.

The template determines them, since it shows the model the format. If the template does not tell, `model_type` of
config.json does.
"""

from dataclasses import replace

from baton.gateway.text.chat import families
from baton.gateway.text.chat.families import ChatFamily
from baton.gateway.text.chat.parsing.deepseek import CALLS_BEGIN
from baton.gateway.text.chat.parsing.kimi import SECTION
from baton.gateway.text.chat.parsing.parser import ReasoningMarkers

# The first family counts whose texts are all in the template.
SHOWN: tuple[tuple[ChatFamily, tuple[str, ...]], ...] = (
    (families.HARMONY, ("<|channel|>", "<|message|>")),
    (families.MISTRAL_NAMED, ("[TOOL_CALLS]", "[ARGS]")),
    (families.MISTRAL_ARRAY, ("[TOOL_CALLS]",)),
    (families.DEEPSEEK_DSML, ("｜DSML｜", "function_calls>")),
    (families.DEEPSEEK_V4, ("｜DSML｜",)),
    (families.DEEPSEEK_FENCED, (CALLS_BEGIN, "```json")),
    (families.DEEPSEEK, (CALLS_BEGIN,)),
    (families.KIMI, (SECTION,)),
    (families.KIMI, ("<|im_system|>tool_declare",)),
    (families.MINIMAX, ("<minimax:tool_call>",)),
    (families.SEED_OSS, ("<seed:tool_call>",)),
    (families.LONGCAT_PAIRS, ("<longcat_arg_key>",)),
    (families.LONGCAT_JSON, ("<longcat_tool_call>",)),
    (families.HUNYUAN_PAIRS, ("<tool_sep>", "<arg_key>")),
    (families.GLM_PAIRS, ("<tool_call>", "<arg_key>")),
    (families.HUNYUAN_ARRAY, ("<tool_calls>",)),
    (families.QWEN_XML, ("<tool_call>", "<parameter=")),
    (families.GRANITE, ("<|tool_call|>", "<|start_of_role|>")),
    (families.PHI_4_FUNCTOOLS, ("functools[",)),
    (families.PHI_4, ("<|tool_call|>",)),
    (families.PHI_4, ("<|tool|>", "<|/tool|>")),
    (families.XLAM, ('[{"name": "tool_call_name"',)),
    (families.FUNCTION_GEMMA_CALLS, ("<start_function_call>",)),
    (families.GEMMA_4_CALLS, ("<|tool_call>",)),
    (families.TOOL_CODE, ("```tool_code",)),
    (families.HERMES, ("<tool_call>",)),
    (families.GRANITE, ("available_tools", "<|start_of_role|>")),
    (families.LLAMA_PYTHONIC, ("<|python_start|>",)),
    (families.LLAMA_PYTHONIC, ("[func_name1(",)),
    (families.LLAMA, ("<|python_tag|>",)),
    (families.LLAMA, ('"parameters": dictionary',)),
    (families.LLAMA, ("<|start_header_id|>", '"parameters"')),
)
OF_MODEL_TYPE = {"gpt_oss": families.HARMONY, "llama4": families.LLAMA, "kimi_k2": families.KIMI}

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
    return OF_MODEL_TYPE.get(model_type, families.UNKNOWN)


def reasoning_of(template: str) -> ReasoningMarkers | None:
    """Returns the markers that the template writes around reasoning or cuts reasoning at; None if it has none."""
    found = next((markers for markers in REASONING if markers.close in template), None)
    # MiniMax's template has the tag `response` around the results of tools.
    if found is None or "<minimax:tool_call>" in template:
        return found
    answer = next((tags for tags in ANSWERS if all(tag in template for tag in tags)), None)
    return found if answer is None else replace(found, answer=answer)
