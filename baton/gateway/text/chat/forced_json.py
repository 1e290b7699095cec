"""Writes grammars of forced calls for the families whose calls are JSON, with or without markers around them."""

import json
from functools import partial

from baton.gateway.text.chat.constraints import Forced, Lark, arguments_schema, json_of, name_of, repeated
from baton.gateway.text.chat.parsing import kimi


def _objects(lark: Lark, forced: Forced, key: str = "arguments") -> str:
    """Returns an expression for one call as `{"name": ..., KEY: ...}`."""
    calls = []
    for tool in forced.tools:
        before = f'{{"name": {json.dumps(name_of(tool), ensure_ascii=False)}, "{key}": '
        calls.append(f"{lark.literal(before)} {json_of(arguments_schema(tool))} {lark.literal('}')}")
    return lark.one_of(calls)


def llama_calls(lark: Lark, forced: Forced) -> str:
    """Returns an expression for objects with semicolons between them."""
    return repeated(_objects(lark, forced, "parameters"), '"; "', parallel=forced.parallel)


def tagged_calls(lark: Lark, forced: Forced, *, open: str, close: str) -> str:
    """Returns an expression for objects that each have their own tag, on lines of their own."""
    begin, end = lark.literal(f"{open}\n"), lark.literal(f"\n{close}")
    call = lark.rule(f"{begin} {_objects(lark, forced)} {end}")
    return repeated(call, r'"\n"', parallel=forced.parallel)


def array_calls(lark: Lark, forced: Forced, *, open: str = "", close: str = "", space: bool = False) -> str:
    """Returns an expression for one array of objects.

    Args:
        open: the text before the array, and `close` the text after it.
        space: a space may follow `open`.
    """
    calls = repeated(_objects(lark, forced), '", "', parallel=forced.parallel)
    return f'{lark.literal(open)} {ARRAY_AFTER_SPACE if space else ARRAY} {calls} "]" {lark.literal(close)}'


ARRAY, ARRAY_AFTER_SPACE = '"["', '" "? "["'
hermes_calls = partial(tagged_calls, open="<tool_call>", close="</tool_call>")


def mistral_named_calls(lark: Lark, forced: Forced) -> str:
    """Returns an expression for calls as `[TOOL_CALLS]NAME[ARGS]{...}`."""
    call = lark.one_of(
        [
            f"{lark.literal(f'[TOOL_CALLS]{name_of(tool)}[ARGS]')} {json_of(arguments_schema(tool))}"
            for tool in forced.tools
        ]
    )
    return f"{call}+" if forced.parallel else call


def deepseek_calls(lark: Lark, forced: Forced, *, fenced: bool) -> str:
    """Returns an expression for calls in DeepSeek's tool tokens, with `fenced` or bare arguments."""
    calls = []
    for tool in forced.tools:
        name = name_of(tool)
        before = f"function<｜tool▁sep｜>{name}\n```json\n" if fenced else f"{name}<｜tool▁sep｜>"
        after = "\n```<｜tool▁call▁end｜>" if fenced else "<｜tool▁call▁end｜>"
        begin = lark.literal("<｜tool▁call▁begin｜>" + before)
        calls.append(f"{begin} {json_of(arguments_schema(tool))} {lark.literal(after)}")
    call = repeated(lark.one_of(calls), r'"\n"?', parallel=forced.parallel)
    return f"{lark.literal('<｜tool▁calls▁begin｜>')} {call} {lark.literal('<｜tool▁calls▁end｜>')}"


def kimi_calls(lark: Lark, forced: Forced) -> str:
    """Returns an expression for a section of calls, whose numbers the model chooses."""
    number = lark.rule("/[0-9]{1,4}/")
    calls = [
        f"{lark.literal(f'{kimi.CALL}functions.{name_of(tool)}:')} {number} {lark.literal(kimi.ARGUMENTS)}"
        f" {json_of(arguments_schema(tool))} {lark.literal(kimi.CALL_END)}"
        for tool in forced.tools
    ]
    call = lark.one_of(calls)
    calls_ = f"{call}+" if forced.parallel else call
    return f"{lark.literal(kimi.SECTION)} {calls_} {lark.literal(kimi.SECTION_END)}"


def harmony_calls(lark: Lark, forced: Forced) -> str:
    """Returns an expression for one call, after which the model ends its output."""
    return lark.one_of(
        [
            lark.literal(f"<|channel|>commentary to=functions.{name_of(tool)} <|constrain|>json<|message|>")
            + f" {json_of(arguments_schema(tool))}"
            for tool in forced.tools
        ]
    )
