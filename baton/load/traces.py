"""Reads recorded requests from files: their times, lengths and shared prefixes. Pure apart from reading the file.

Three forms are read, also as .xz; a file's first line shows which one it has: Mooncake's lines of JSON, Azure's CSV, or
lines of JSON with the fields of `TraceRequest`.
"""

import csv
import json
import lzma
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from baton.core.errors import InvalidRequest
from baton.core.regular_file import write_regular_file

MOONCAKE_PREFIX_TOKENS = 512  # per hash id, by the traces' description
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True)
class TraceRequest:
    """One recorded request.

    Args:
        at_s: when it was sent, after the trace's first request.
        prefix_ids: each stands for `prefix_tokens` tokens of the prompt, in order from its start; the last one may
            stand for fewer. Requests whose first n ids are equal have equal first n * `prefix_tokens` tokens.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    prefix_tokens: int = 0


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a trace, in order of time, with the first one at 0 s.

    Raises:
        InvalidRequest: the file cannot be read, or one of its lines has no known form.
    """
    try:
        if path.is_char_device():  # such as /dev/zero, whose first line has no end
            raise OSError(0, "it is a device")
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
            requests = _read(path, file)
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError, csv.Error) as error:
        raise InvalidRequest(f"the trace {path} cannot be read: {error}", field="trace", value=path) from None
    if not requests:
        raise InvalidRequest(f"the trace {path} has no requests", field="trace", value=path)
    first_s = min(request.at_s for request in requests)
    moved = (TraceRequest(**{**vars(request), "at_s": request.at_s - first_s}) for request in requests)
    return sorted(moved, key=lambda request: request.at_s)


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Writes Baton's own form: lines of JSON with the fields of `TraceRequest`."""
    write_regular_file(path, "".join(json.dumps(asdict(request)) + "\n" for request in requests))


def _read(path: Path, file: TextIO) -> list[TraceRequest]:
    first = file.readline()
    file.seek(0)
    if first.lstrip().startswith("{"):
        lines: Iterable[Any] = (line for line in file if line.strip())
        parse: Callable[[Any], TraceRequest] = _from_json
    elif tuple(first.strip().lstrip("\ufeff").split(",")) == _AZURE_COLUMNS:
        file.readline()
        lines, parse = csv.DictReader(file, fieldnames=_AZURE_COLUMNS), _from_azure
    else:
        raise InvalidRequest(
            f"the trace {path} starts with {first.strip()[:60]!r}", field="trace", value=path,
            allowed=("lines of JSON", f"CSV with the columns {','.join(_AZURE_COLUMNS)}"),
        )  # fmt: skip
    requests = []
    for number, line in enumerate(lines, 1):
        try:
            requests.append(_checked(parse(line)))
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            detail = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise InvalidRequest(f"request {number} of {path}: {detail}", field="trace", value=path) from None
    return requests


def _checked(request: TraceRequest) -> TraceRequest:
    if request.prompt_tokens < 1 or request.output_tokens < 0:
        raise ValueError(f"{request.prompt_tokens} tokens in and {request.output_tokens} out")
    if request.prefix_ids and request.prefix_tokens < 1:
        raise ValueError(f"prefix_ids with {request.prefix_tokens} tokens each")
    return request


def _from_json(line: str) -> TraceRequest:
    found = json.loads(line)
    return _from_mooncake(found) if "timestamp" in found else _from_own(found)


def _from_mooncake(found: Mapping[str, Any]) -> TraceRequest:
    return TraceRequest(
        at_s=float(found["timestamp"]) / 1000,
        prompt_tokens=int(found["input_length"]),
        output_tokens=int(found["output_length"]),
        prefix_ids=tuple(map(int, found["hash_ids"])),
        prefix_tokens=MOONCAKE_PREFIX_TOKENS,
    )


def _from_own(found: Mapping[str, Any]) -> TraceRequest:
    return TraceRequest(
        at_s=float(found["at_s"]),
        prompt_tokens=int(found["prompt_tokens"]),
        output_tokens=int(found["output_tokens"]),
        prefix_ids=tuple(map(int, found.get("prefix_ids", ()))),
        prefix_tokens=int(found.get("prefix_tokens", 0)),
    )


def _from_azure(row: Mapping[str, str]) -> TraceRequest:
    # NOTE: the times have seven decimals, which `fromisoformat` refuses: it takes six.
    time, _, fraction = row["TIMESTAMP"].partition(".")
    return TraceRequest(
        at_s=datetime.fromisoformat(f"{time}+00:00").timestamp() + float(f"0.{fraction or 0}"),
        prompt_tokens=int(row["ContextTokens"]),
        output_tokens=int(row["GeneratedTokens"]),
    )
