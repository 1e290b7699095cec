"""Turns the JSON log lines of a local cluster's processes into lines for a person: one row for each request that has
ended, warnings and errors, and with `verbose` everything else. Does no I/O.
"""

import json
from collections.abc import Mapping
from typing import Any

from baton.cli.sizes import mib, milliseconds
from baton.core.log_lines import escaped

_IMPORTANT = ("warning", "error", "critical")
# Fields of every record, which come before its own.
_COMMON = ("time", "level", "role", "name", "message", "lines")
# The gateway logs a failed request as a warning with its cause, which says more than a row.
_FAILED = ("failed", "deadline")
_FINISHED = "finished"
# Each row fits 80 columns; prompt and output are in tokens.
_COLUMNS = ("{:>6}", "{:<11}", "{:<11}", "{:<18}", "{:>8}", "{:>8}", "{:>6}")
HEADER = "  ".join(
    form.format(name)
    for form, name in zip(
        _COLUMNS, ("prompt", "prefilled", "decoded", "KV moved", "TTFT", "TPOT", "output"), strict=True
    )
)
_NAME_MAX = 11


class ClusterLog:
    """What `baton up` shows of its processes' logs.

    Args:
        verbose: show every record.
    """

    def __init__(self, *, verbose: bool = False) -> None:
        self._verbose = verbose

    def shown(self, line: str) -> str:
        """Returns what to show for one line of a process; empty: nothing.

        A line that is not a log record, such as one of a traceback, is shown as it is.
        """
        record = _record(line)
        if record is None:
            return line
        if record.get("message") == "request" and "outcome" in record:
            return _request(record)
        if self._verbose or record["level"] in _IMPORTANT:
            return _as_text(record)
        return ""


def _request(record: Mapping[str, Any]) -> str:
    outcome = str(record["outcome"])
    if outcome in _FAILED:
        return ""
    if outcome != _FINISHED or "prompt_tokens" not in record:
        return f"{outcome.replace('_', ' ')} after {_milliseconds(record.get('total_s'))}"
    return _row(record)


def _row(record: Mapping[str, Any]) -> str:
    """The row of a request that was served to its end."""
    prefill, decode = str(record.get("prefill_node", "")), str(record.get("decode_node", ""))
    sent = record.get("bytes_sent", 0)
    cells = (
        str(record["prompt_tokens"]),
        escaped(prefill or decode)[:_NAME_MAX],
        escaped(decode)[:_NAME_MAX],
        f"{mib(sent)}, {escaped(str(record.get('transport', '')))}" if sent else "nothing",
        _milliseconds(record.get("ttft_s")),
        _milliseconds(_tpot_s(record)),
        str(record.get("completion_tokens", "")),
    )
    notes = []
    if record.get("path") == "split":
        notes.append(f"rest prefilled on {escaped(decode)}")
    if cached := record.get("cached_tokens", 0):
        notes.append(f"{cached} cached")
    row = "  ".join(form.format(cell) for form, cell in zip(_COLUMNS, cells, strict=True))
    return f"{row}  {', '.join(notes)}" if notes else row


def _tpot_s(record: Mapping[str, Any]) -> float | None:
    """Mean time of a token after the first of its output."""
    outputs = record.get("outputs", 1)
    later = record.get("completion_tokens", 0) - outputs
    if later <= 0 or "ttft_s" not in record:
        return None
    return float(max(0.0, record["total_s"] - record["ttft_s"]) * outputs / later)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else milliseconds(seconds)


def _record(line: str) -> dict[str, Any] | None:
    """The log record of a line. Returns None if the line is not a record."""
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    is_record = isinstance(record, dict) and all(isinstance(record.get(each), str) for each in ("level", "message"))
    return record if is_record else None


def _as_text(record: Mapping[str, Any]) -> str:
    """`TIME NAME LEVEL message key=value ...`, and further lines indented."""
    time = str(record.get("time", ""))[11:19]
    name = str(record.get("name") or record.get("role", ""))
    fields = "".join(f" {key}={_value(each)}" for key, each in record.items() if key not in _COMMON)
    lines = record.get("lines", ())
    further = [f"    {escaped(str(each))}" for each in lines] if isinstance(lines, list) else []
    first = f"{time} {escaped(name)} {record['level'].upper()} {escaped(record['message'])}{fields}"
    return "\n".join([first, *further])


def _value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if text and text.isprintable() and not any(each in text for each in ' "=') else json.dumps(text)
