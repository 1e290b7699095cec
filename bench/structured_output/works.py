"""Schemas of several kinds, each with an output that follows it. Pure."""

from dataclasses import dataclass
from typing import Any

Json = Any


@dataclass(frozen=True)
class Work:
    """A schema and an output that follows it."""

    name: str
    schema: Json
    output: Json


WORKS = (
    Work(
        "tool call",
        {
            "type": "object",
            "properties": {
                "name": {"const": "get_weather"},
                "arguments": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
                    "required": ["city", "unit"],
                    "additionalProperties": False,
                },
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        },
        {"name": "get_weather", "arguments": {"city": "San Francisco, California", "unit": "celsius"}},
    ),
    Work(
        "records",
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "id": {"type": "integer", "minimum": 1},
                    "title": {"type": "string", "maxLength": 80},
                    "done": {"type": "boolean"},
                    "due": {"type": "string", "format": "date"},
                    "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
                },
                "required": ["id", "title", "done", "due"],
                "additionalProperties": False,
            },
        },
        [
            {"id": 17, "title": "Write the report on latencies", "done": False, "due": "2026-11-22", "tags": ["a"]},
            {"id": 18, "title": "Read it again", "done": True, "due": "2026-12-01"},
        ],
    ),
    Work(
        "free text",
        {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
        {"answer": "The decode node asks for the prompt, and the prefill node sends it layer by layer. " * 4},
    ),
    Work(
        "tree",
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "value": {"type": "number"},
                        "next": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                    },
                    "required": ["value", "next"],
                    "additionalProperties": False,
                }
            },
        },
        {"value": 1.5, "next": [{"value": 2, "next": []}, {"value": -3e4, "next": [{"value": 4, "next": []}]}]},
    ),
    Work(
        "500 names",
        {"type": "array", "items": {"enum": [f"value number {index}" for index in range(500)]}},
        ["value number 12", "value number 499", "value number 7"],
    ),
    Work(
        "patterns",
        {
            "type": "object",
            "properties": {
                "phone": {"type": "string", "pattern": "^\\+[0-9]{1,3} [0-9]{3}-[0-9]{4}$"},
                "code": {"type": "string", "pattern": "^([A-Z]{2,4}-?){1,4}[0-9]*$"},
            },
            "required": ["phone", "code"],
            "additionalProperties": False,
        },
        {"phone": "+49 555-1234", "code": "AB-CDEF-12345"},
    ),
    Work("any object", {"type": "object"}, {"a": [1, 2.5, None, True], "b": {"c": "a text of some words", "d": []}}),
)
