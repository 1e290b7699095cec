"""Converts a conversation's messages to the form that a template expects.

If the template takes a system message only at the beginning, later ones are folded into other messages. Each keeps its
place, so that the prompt of a later turn still begins with that of this one.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from jinja2 import nodes

from baton.core.errors import InvalidRequest
from baton.gateway.text.chat.parsing.lenient_json import ArgumentReader
from baton.gateway.text.chat.templates import CONTINUE_MARK, ChatTemplate, Misfit
from baton.gateway.text.chat.types import Json

CONTENT_TEST = re.compile(r"content\W{0,3}\s+is\s+(not\s+)?(string|iterable|sequence|mapping)\b")
ContentFormat = Literal["string", "parts"]
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # most templates read the first one
_PROBE_RESULT = "probe result"
_TAGGED = "<system-reminder>\n{}\n</system-reminder>"


def content_format(template: ChatTemplate) -> ContentFormat:
    """Returns "parts" if the template handles a content that is a list of parts, else "string"."""
    if CONTENT_TEST.search(template.text):
        return "parts"
    aliases = {"content"} if _macro_takes_content(template.tree) else set[str]()
    for assign in template.tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node):
            aliases.add(assign.target.name)
    for loop in template.tree.find_all(nodes.For):
        source = _unfiltered(loop.iter)
        if _is_content(source) or (isinstance(source, nodes.Name) and source.name in aliases):
            return "parts"
    return "string"


def _macro_takes_content(tree: nodes.Template) -> bool:
    return any(argument.name == "content" for macro in tree.find_all(nodes.Macro) for argument in macro.args)


def _unfiltered(node: nodes.Node | None) -> nodes.Node | None:
    while isinstance(node, nodes.Filter):
        node = node.node
    return node


def _is_content(node: nodes.Node | None) -> bool:
    node = _unfiltered(node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"


def takes_argument_objects(template: ChatTemplate, variables: Mapping[str, str]) -> bool:
    """Whether the template expects a tool call's arguments as an object, as most do, and not as a string of JSON.

    It expects a string if an object breaks the template or is written in Python's syntax.
    """
    as_object = _probe(template, variables, {"probe": 1})
    if as_object and "{'probe': 1}" not in as_object:
        return True
    return '{"probe": 1}' not in _probe(template, variables, '{"probe": 1}')


def shows_results(template: ChatTemplate, variables: Mapping[str, str]) -> bool:
    """Whether the template writes the results of tools into the prompt. One that knows no calls leaves them out."""
    return any(_PROBE_RESULT in _probe(template, variables, arguments) for arguments in ({"probe": 1}, '{"probe": 1}'))


def _probe(template: ChatTemplate, variables: Mapping[str, str], arguments: object) -> str:
    call = {"id": "probe0000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
    messages: list[Json] = [
        {"role": "user", "content": "probe"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "probe0000", "name": "probe", "content": _PROBE_RESULT},
        {"role": "assistant", "content": "probe"},
    ]
    try:
        return template.render(messages, None, add_generation_prompt=False, variables=variables)
    except (Misfit, InvalidRequest):
        return ""


def takes_system_anywhere(template: ChatTemplate, variables: Mapping[str, str], form: "MessageForm") -> bool:
    """Whether the template writes system messages in the middle of a conversation at their places.

    Some refuse them, and some leave them out. True also if the template takes no system message at all.
    """
    plain: list[Json] = [
        {"role": "system", "content": "probe0"},
        {"role": "user", "content": "probe1"},
        {"role": "assistant", "content": "probe3"},
        {"role": "user", "content": "probe4"},
    ]
    system: list[Json] = [{"role": "system", "content": f"probe{place}"} for place in (2, 5)]
    if not _in_order(template, variables, form, plain, (0, 1, 3, 4)):
        return True
    mixed = [*plain[:2], system[0], *plain[2:], system[1]]
    return _in_order(template, variables, form, mixed, range(6))


def _in_order(
    template: ChatTemplate,
    variables: Mapping[str, str],
    form: "MessageForm",
    messages: Sequence[Json],
    numbers: Iterable[int],
) -> bool:
    """Whether the template renders the messages of a probe, and writes their texts in their order."""
    try:
        text = template.render(for_template(messages, form), None, add_generation_prompt=True, variables=variables)
    except (Misfit, InvalidRequest):
        return False
    places = [text.find(f"probe{number}") for number in numbers]
    return min(places) >= 0 and places == sorted(places)


@dataclass(frozen=True)
class MessageForm:
    """The form of messages that a template expects.

    Attributes:
        content: whether the template handles a content that is a list of parts.
        wrap_strings: whether it handles nothing but parts.
        argument_objects: whether it expects tool calls' arguments as objects, not as strings of JSON.
        developer: whether it knows the role `developer`; otherwise the role becomes `system`.
        system_anywhere: whether it writes system messages in the middle of a conversation at their places; otherwise
            they become part of other messages.
    """

    content: ContentFormat
    wrap_strings: bool
    argument_objects: bool
    developer: bool
    system_anywhere: bool


def for_template(messages: Sequence[Json], form: MessageForm) -> list[dict[str, Any]]:
    """Returns copies of the messages, with contents, tool calls and reasoning as the template expects them."""
    arguments = ArgumentReader()
    made = [_message(message, f"messages[{index}]", form, arguments) for index, message in enumerate(messages)]
    return made if form.system_anywhere else fold_system(made)


def _message(message: Json, field: str, form: MessageForm, arguments: ArgumentReader) -> dict[str, Any]:
    # Templates handle a missing key; few handle None.
    made = {key: value for key, value in message.items() if value is not None}
    if made.get("role") == "developer" and not form.developer:
        made["role"] = "system"
    if "content" in made:
        made["content"] = _content(made["content"], f"{field}.content", form)
    if made.get("tool_calls"):
        made["tool_calls"] = [_tool_call(call, form, arguments) for call in made["tool_calls"]]
    elif "tool_calls" in made:
        del made["tool_calls"]  # because templates test only whether the key exists
    reasoning = next((made[name] for name in REASONING_FIELDS if name in made), None)
    if reasoning is not None:
        made = {"thinking": reasoning, **made, "reasoning_content": reasoning}
    return made


def _content(content: Any, field: str, form: MessageForm) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if form.wrap_strings else content
    texts = [_text(part, f"{field}[{index}]") for index, part in enumerate(content)]
    if form.content == "string":
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _text(part: Any, field: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text"):
        return str(part["text"])
    if kind == "refusal":
        return str(part["refusal"])
    raise InvalidRequest(
        f"{field}.type is {kind!r}",
        field=f"{field}.type",
        value=kind,
        allowed=("text",),
        cure="this model reads text only",
    )


def _tool_call(call: Json, form: MessageForm, arguments: ArgumentReader) -> dict[str, Any]:
    """Converts a call. Its arguments may be broken JSON, which a model wrote and the client sends back."""
    function = dict(call["function"])
    given = function.get("arguments", "{}")
    if form.argument_objects and isinstance(given, str):
        function["arguments"] = arguments.read(given)
    elif not form.argument_objects and not isinstance(given, str):
        function["arguments"] = json.dumps(given, ensure_ascii=False)
    return {"type": "function", **call, "function": function}


def add_tools(messages: list[dict[str, Any]], tools: Sequence[Json]) -> None:
    """Gives the system message the tools as JSON, in place, for a template that reads them there."""
    if not tools:
        return
    if not messages or messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": "You are a helpful assistant with some tools."})
    messages[0]["tools"] = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)


def mark_final(messages: list[dict[str, Any]]) -> str:
    """Adds a mark to the end of the last message's text, in place, and returns the text without it.
    Raises:
        InvalidRequest: the last message has no text to continue.
    """
    field = f"messages[{len(messages) - 1}].content"
    final = messages[-1]
    content = final.get("content")
    if isinstance(content, str):
        final["content"] = content + CONTINUE_MARK
        return content
    for part in reversed(content or ()):
        text = str(part["text"])
        part["text"] = text + CONTINUE_MARK
        return text
    raise InvalidRequest(
        f"{field} is empty, and continue_final_message is set", field=field, cure="give the text to continue"
    )


def cut_at_mark(prompt: str, text: str) -> str:
    """Returns the prompt up to the end of the text to continue.

    Raises:
        InvalidRequest: the template does not write the last message unchanged.
    """
    mark = CONTINUE_MARK.strip()
    where = prompt.rfind(mark)
    if where < 0 or text.strip() not in prompt:
        raise InvalidRequest(
            "the chat template changes the last message, so the message cannot be continued",
            field="continue_final_message",
            value=True,
        )
    if prompt.startswith(CONTINUE_MARK, where):
        return prompt[:where]
    return prompt[:where].rstrip()  # the template trims its messages


def fold_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with at most one system message, which comes first.

    Further ones at the beginning join it. One after a message of the user or a tool is added to that message; one after
    an answer is added to the beginning of the user's next message.
    """
    folded: list[dict[str, Any]] = []
    waiting = ""  # instructions after an answer
    for is_system, group in groupby(messages, key=lambda message: message.get("role") == "system"):
        if not is_system:
            folded += _after(waiting, list(group))
            waiting = ""
        elif not folded:
            first, *others = group
            folded.append(_with(first, [_content_text(message) for message in others]))
        else:
            tagged = [_TAGGED.format(_content_text(message)) for message in group]
            if folded[-1].get("role") == "assistant":
                waiting = "\n\n".join(tagged)
            else:
                folded[-1] = _with(folded[-1], tagged)
    return folded + _after(waiting, [])


def _after(waiting: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds instructions that wait to the messages after them. Between a call and its result, the result gets them."""
    if not waiting:
        return messages
    if messages and messages[0].get("role") == "tool":
        return [_with(messages[0], [waiting]), *messages[1:]]
    if messages and messages[0].get("role") == "user":
        first, *others = messages
        return [{**first, "content": _joined([waiting, first.get("content", "")])}, *others]
    return [{"role": "user", "content": waiting}, *messages]


def _with(message: dict[str, Any], texts: Iterable[str]) -> dict[str, Any]:
    return {**message, "content": _joined([message.get("content", ""), *texts])}


def _content_text(message: dict[str, Any]) -> str:
    content = message.get("content", "")
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _joined(contents: Sequence[Any]) -> Any:
    """Joins contents, each a string or a list of parts; a string, unless one of them is a list."""
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(filter(None, contents))
    return [part for content in contents for part in _parts(content)]


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)
