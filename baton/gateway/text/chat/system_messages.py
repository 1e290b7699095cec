"""Folds instructions in the middle of a conversation into its other messages, for templates that take a system message
only at the beginning. Pure.

Each instruction keeps its place, so that the prompt of a later turn still begins with that of this one.
"""

from collections.abc import Sequence
from typing import Any

_TAGGED = "<system-reminder>\n{}\n</system-reminder>"


def fold_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with at most one system message, which comes first.

    Further ones at the beginning join it. One after a message of the user or a tool is added to that message; one after
    an answer is added to the beginning of the user's next message.
    """
    folded: list[dict[str, Any]] = []
    waiting: list[str] = []  # instructions after an answer
    for message in messages:
        role = message.get("role")
        if role == "system" and folded and folded[-1].get("role") == "assistant":
            waiting.append(_tagged(message))
        elif role == "system" and folded:
            text = _text(message) if folded[-1].get("role") == "system" else _tagged(message)
            folded[-1] = {**folded[-1], "content": _joined(folded[-1].get("content", ""), text)}
        elif role == "user" and waiting:
            folded.append({**message, "content": _joined("\n\n".join(waiting), message.get("content", ""))})
            waiting = []
        else:
            folded += _as_user(waiting)
            waiting = []
            folded.append(message)
    return folded + _as_user(waiting)


def _as_user(texts: Sequence[str]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "\n\n".join(texts)}] if texts else []


def _text(message: dict[str, Any]) -> str:
    content = message.get("content", "")
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _tagged(message: dict[str, Any]) -> str:
    return _TAGGED.format(_text(message))


def _joined(first: Any, second: Any) -> Any:
    """Joins two contents, each a string or a list of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return "\n\n".join(filter(None, (first, second)))
    return [part for content in (first, second) for part in _parts(content)]


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)
