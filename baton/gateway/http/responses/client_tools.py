"""Tools of OpenAI's that a client runs itself: functions as the model sees them, and the items of their calls. Pure."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class ClientRunTool:
    """A tool that has a type of its own instead of a name.

    Attributes:
        description, parameters: those of the function that the model sees; it has the type as its name.
        item_type: type of the items with its calls.
        id_prefix: beginning of such an item's id.
        fields: makes an item's own fields from the arguments that the model wrote.
    """

    description: str
    parameters: Json
    item_type: str
    id_prefix: str
    fields: Callable[[Json], Json]


def _commands(given: object) -> list[str]:
    """Returns a list of texts, whatever the model wrote in its place."""
    if isinstance(given, list):
        return [each if isinstance(each, str) else json.dumps(each) for each in given]
    return [] if given is None else [given if isinstance(given, str) else json.dumps(given)]


def _local_shell(arguments: Json) -> Json:
    command = arguments.get("command")
    words = ["bash", "-lc", command] if isinstance(command, str) else _commands(command)
    others = {name: arguments[name] for name in ("working_directory", "timeout_ms") if name in arguments}
    return {"action": {"type": "exec", "command": words, "env": {}, **others}}


def _shell(arguments: Json) -> Json:
    others = {name: arguments.get(name) for name in ("timeout_ms", "max_output_length")}
    return {"action": {"commands": _commands(arguments.get("commands")), **others}}


def _apply_patch(arguments: Json) -> Json:
    kind, path = str(arguments.get("type", "update_file")), str(arguments.get("path", ""))
    operation: Json = {"type": kind, "path": path}
    if kind != "delete_file":
        operation["diff"] = str(arguments.get("diff", ""))
    return {"operation": operation}


def _tool_search(arguments: Json) -> Json:
    return {"arguments": arguments, "execution": "client"}


def _object(properties: Json, *required: str) -> Json:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_TEXTS = {"type": "array", "items": {"type": "string"}}
_TIMEOUT = {"type": "integer", "description": "limit in milliseconds"}

CLIENT_TOOLS: Mapping[str, ClientRunTool] = MappingProxyType(
    {
        "local_shell": ClientRunTool(
            "Runs a command on the user's machine and returns its output.",
            _object(
                {
                    "command": {**_TEXTS, "description": "the program and its arguments"},
                    "working_directory": {"type": "string"},
                    "timeout_ms": _TIMEOUT,
                },
                "command",
            ),
            "local_shell_call",
            "lsh",
            _local_shell,
        ),
        "shell": ClientRunTool(
            "Runs shell commands, one after the other, and returns their output.",
            _object(
                {
                    "commands": {**_TEXTS, "description": "command lines"},
                    "timeout_ms": _TIMEOUT,
                    "max_output_length": {"type": "integer", "description": "most characters of output"},
                },
                "commands",
            ),
            "shell_call",
            "sh",
            _shell,
        ),
        "apply_patch": ClientRunTool(
            "Creates, updates or deletes one file.",
            _object(
                {
                    "type": {"enum": ["create_file", "update_file", "delete_file"]},
                    "path": {"type": "string", "description": "path of the file in the workspace"},
                    "diff": {
                        "type": "string",
                        "description": "for create_file and update_file: lines that begin with '+', '-' or a space, "
                        "after '@@' and a line of context",
                    },
                },
                "type",
                "path",
            ),
            "apply_patch_call",
            "apc",
            _apply_patch,
        ),
        "tool_search": ClientRunTool(
            "Searches more tools. The tools that it finds can be called afterwards.",
            _object({"query": {"type": "string"}}, "query"),
            "tool_search_call",
            "tsc",
            _tool_search,
        ),
    }
)
