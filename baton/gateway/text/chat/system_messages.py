"""Folds instructions in the middle of a conversation into its other messages, for templates that take a system message
only at the beginning. Pure.

Each instruction keeps its place, so that the prompt of a later turn still begins with that of this one.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

_TAGGED = "<system-reminder>\n{}\n</system-reminder>"


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
            folded.append(_with(first, [_text(message) for message in others]))
        else:
            tagged = [_TAGGED.format(_text(message)) for message in group]
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


def _text(message: dict[str, Any]) -> str:
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
