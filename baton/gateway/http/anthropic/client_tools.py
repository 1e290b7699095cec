"""Descriptions and schemas of the tools that Anthropic defines and the client runs. A model that was not trained on
them learns them from its prompt. Pure."""

from typing import Any

_PATH = {"type": "string", "description": "path of the file or directory"}
_TEXT = {"type": "string"}
_LINES = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "for view: first and last line, from 1; a last line of -1 means the end of the file",
}
_WITH_UNDO = ("text_editor_20241022", "text_editor_20250124")


def description_of(type: str) -> str:
    """Returns what a tool does, for the prompt."""
    if type.startswith("bash_"):
        return (
            "Runs a command in a bash session that keeps its state between calls, and returns its output. "
            "With restart, begins a new session."
        )
    if type.startswith("memory_"):
        return (
            "Keeps files in the directory /memories between conversations. view shows a file or directory, create "
            "writes a file, str_replace replaces the text old_str, insert adds insert_text after the line insert_line, "
            "delete removes a file or directory, rename moves it from old_path to new_path."
        )
    return (
        "Shows and edits text files. view shows a file or directory, create writes a file, str_replace replaces the "
        "text old_str, which must occur exactly once, with new_str, insert adds new_str after the line insert_line."
    )


def schema_of(type: str) -> dict[str, Any]:
    """Returns the JSON schema of a tool's input."""
    if type.startswith("bash_"):
        command = {"type": "string", "description": "the command; not needed with restart"}
        return _object({"command": command, "restart": {"type": "boolean"}}, required=())
    if type.startswith("memory_"):
        commands = ("view", "create", "str_replace", "insert", "delete", "rename")
        texts = ("file_text", "old_str", "new_str", "insert_text", "old_path", "new_path")
        return _of_commands(commands, texts, required=("command",))
    undo = ("undo_edit",) if type in _WITH_UNDO else ()
    commands = ("view", "create", "str_replace", "insert", *undo)
    return _of_commands(commands, ("file_text", "old_str", "new_str"), required=("command", "path"))


def _of_commands(commands: tuple[str, ...], texts: tuple[str, ...], *, required: tuple[str, ...]) -> dict[str, Any]:
    command = {"type": "string", "enum": list(commands)}
    line = {"type": "integer", "description": "for insert: the line after which the text is added; 0 is the beginning"}
    given = {"command": command, "path": _PATH, "view_range": _LINES, "insert_line": line}
    return _object({**given, **dict.fromkeys(texts, _TEXT)}, required=required)


def _object(properties: dict[str, Any], *, required: tuple[str, ...]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
