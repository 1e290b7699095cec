"""Parses the prompts of `baton generate`: token ids, or a file of JSON lines or of one text per line."""

import json
from dataclasses import dataclass
from pathlib import Path

import typer

Prompt = str | list[int]
_KEYS = ("prompt", "id")


@dataclass(frozen=True)
class PromptRecord:
    """One prompt of a file.

    Attributes:
        index: position in the file, from 0; blank lines do not count.
        id: the record's "id", if it has one; the result repeats it.
    """

    index: int
    prompt: Prompt
    id: object = None


def read_records(file: Path) -> list[PromptRecord]:
    """Reads the prompts of a file, without blank lines.

    If the file's name ends in .jsonl, or every line is a JSON string or object, the lines are JSON; otherwise each line
    is a prompt.

    Raises:
        BadParameter: the file cannot be read, has no prompts, or a line is wrong; the error names the line.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {error}", param_hint="--file") from None
    # Not splitlines, which would cut JSON strings at U+2028.
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise typer.BadParameter(f"{file} has no prompts", param_hint="--file")
    if file.suffix == ".jsonl" or all(isinstance(_parsed(line), str | dict) for _, line in lines):
        return [_record(file, index, number, line) for index, (number, line) in enumerate(lines)]
    return [PromptRecord(index, line) for index, (_, line) in enumerate(lines)]


def parse_token_ids(text: str) -> list[int]:
    """Parses a comma-separated list of token ids.

    Raises:
        BadParameter: the text is not such a list.
    """
    try:
        token_ids = [int(part) for part in text.split(",")]
    except ValueError:
        token_ids = [-1]
    if min(token_ids) < 0:
        raise typer.BadParameter(f"{text!r} is not a list of token ids such as 1,2,3", param_hint="--token-ids")
    return token_ids


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _record(file: Path, index: int, number: int, line: str) -> PromptRecord:
    value = _parsed(line)
    if isinstance(value, str):
        return PromptRecord(index, value)
    if not isinstance(value, dict):
        raise _wrong(file, number, 'is neither a JSON string nor an object such as {"prompt": "Once"}')
    if unknown := sorted(value.keys() - set(_KEYS)):
        raise _wrong(file, number, f"has {unknown[0]!r}; allowed: {', '.join(_KEYS)}")
    prompt = value.get("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(_is_token_id(each) for each in prompt)):
        return PromptRecord(index, prompt, value.get("id"))
    raise _wrong(file, number, "has no prompt; give a text or a list of token ids")


def _is_token_id(value: object) -> bool:
    return type(value) is int and value >= 0


def _wrong(file: Path, number: int, what: str) -> typer.BadParameter:
    return typer.BadParameter(f"line {number} of {file} {what}", param_hint="--file")
