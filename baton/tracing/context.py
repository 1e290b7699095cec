"""Reads and writes the W3C trace context, `traceparent` and `tracestate`. Pure.

A malformed traceparent is ignored, and a tracestate without one, or beyond its limits, is dropped, as the standard
requires.
"""

import re
from dataclasses import dataclass

# Version 00 has these four fields and no more; later ones may have more.
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-[\x21-\x7e]*)?"
)
_TRACEPARENT_MAX = 512
_STATE_MAX = 512  # characters
_STATE_MEMBERS_MAX = 32
_STATE_MEMBER = re.compile(
    r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_SAMPLED = 1


@dataclass(frozen=True)
class TraceContext:
    """The caller's span.

    Attributes:
        sampled: whether the caller records its trace.
        state: tracestate, passed on unchanged.
    """

    trace_id: int
    span_id: int
    sampled: bool
    state: str = ""


def read_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """The caller's span from the two headers. Returns None if they have no valid one."""
    found = _TRACEPARENT.fullmatch(traceparent) if len(traceparent) <= _TRACEPARENT_MAX else None
    if found is None or (found[1] == "00" and found[5] is not None):
        return None
    return TraceContext(
        int(found[2], 16), int(found[3], 16), bool(int(found[4], 16) & _SAMPLED), _checked_state(tracestate)
    )


def write_traceparent(trace_id: int, span_id: int, *, sampled: bool) -> str:
    return f"00-{trace_id:032x}-{span_id:016x}-{int(sampled):02x}"


def _checked_state(state: str) -> str:
    members = [member.strip(" \t") for member in state.split(",")] if len(state) <= _STATE_MAX else []
    members = [member for member in members if member]
    whole = len(members) <= _STATE_MEMBERS_MAX and all(_STATE_MEMBER.fullmatch(member) for member in members)
    return ",".join(members) if whole else ""
