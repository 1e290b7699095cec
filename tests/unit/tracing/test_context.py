"""What W3C trace context headers say, and which of them count as none."""

import pytest

from baton.tracing.context import TraceContext, read_context, write_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


def test_a_traceparent_names_the_callers_span() -> None:
    assert read_context(PARENT) == TraceContext(int(TRACE, 16), int(SPAN, 16), sampled=True)


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("ff", True)])
def test_only_the_last_flag_samples(flags: str, sampled: bool) -> None:
    context = read_context(f"00-{TRACE}-{SPAN}-{flags}")
    assert context is not None
    assert context.sampled is sampled


def test_what_is_written_is_read_again() -> None:
    written = write_traceparent(5, 7, sampled=True)
    assert len(written) == len(PARENT)
    assert read_context(written) == TraceContext(5, 7, sampled=True)


def test_a_later_version_may_have_more_fields() -> None:
    assert read_context(f"cc-{TRACE}-{SPAN}-01-what-comes-later") == read_context(PARENT)


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00",
        PARENT.upper(),
        f" {PARENT}",
        f"{PARENT}\n",
        f"{PARENT}-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-\u0660\u0661",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 1_000_000}",
        "0" * 1_000_000,
    ],
)
def test_a_malformed_or_huge_traceparent_counts_as_none(traceparent: str) -> None:
    assert read_context(traceparent, "a=b") is None


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        ("rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"),
        (" a=b ,\t, tenant@vendor=c ", "a=b,tenant@vendor=c"),
        (",".join(f"k{number}=v" for number in range(32)), ",".join(f"k{number}=v" for number in range(32))),
    ],
)
def test_tracestate_is_passed_on(given: str, passed_on: str) -> None:
    context = read_context(PARENT, given)
    assert context is not None
    assert context.state == passed_on


@pytest.mark.parametrize(
    "state",
    [
        "nothing",
        "a=",
        "A=b",
        "a=b=c",
        "a=\x00",
        "a=\u00e9",
        "a=b,c",
        f"a={'b' * 257}",
        ",".join(f"k{number}=v" for number in range(33)),
        "a=b," * 1_000_000,
    ],
)
def test_a_malformed_or_huge_tracestate_is_dropped_and_the_trace_goes_on(state: str) -> None:
    context = read_context(PARENT, state)
    assert context is not None
    assert context.state == ""
