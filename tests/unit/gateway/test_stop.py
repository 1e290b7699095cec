"""Stop strings end the text at the same place for any way of cutting it into pieces."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.gateway.text.reply import StopStrings

letters = st.text("ab", max_size=12)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def run(pieces: Sequence[str], stops: Sequence[str], *, include_stop: bool = False) -> tuple[str, str | None]:
    """All text that is shown, and the stop string that ended it."""
    strings = StopStrings(stops, include_stop=include_stop)
    shown = ""
    for piece in pieces:
        passed = strings.push(piece)
        shown += passed.text
        if passed.stop is not None:
            return shown, passed.stop
    return shown + strings.finish(), None


def matches(text: str, stops: Sequence[str]) -> list[tuple[int, int, str]]:
    """End, start and stop string of every match, by looking at every place; the least is complete first."""
    return [
        (start + len(stop), start, stop)
        for stop in stops
        for start in range(len(text))
        if text[start : start + len(stop)] == stop
    ]


@given(pieces=st.lists(letters, max_size=8), stops=stop_lists, include_stop=st.booleans())
def test_the_first_complete_stop_string_ends_the_text(pieces: list[str], stops: list[str], include_stop: bool) -> None:
    text = "".join(pieces)
    match = min(matches(text, stops), default=None)
    shown, stop = run(pieces, stops, include_stop=include_stop)
    if match is None:
        assert (shown, stop) == (text, None)
    else:
        end, start, stop_string = match
        assert (shown, stop) == (text[: end if include_stop else start], stop_string)


@given(pieces=st.lists(letters, max_size=8), stops=stop_lists)
def test_only_the_beginning_of_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    strings = StopStrings(stops, include_stop=False)
    shown = given_so_far = ""
    for piece in pieces:
        passed = strings.push(piece)
        if passed.stop is not None:
            return
        shown, given_so_far = shown + passed.text, given_so_far + piece
        held = given_so_far[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [(["one\n", "\ntwo"], "one"), (["one\n", "two\n", "\n"], "one\ntwo"), (["one\n"], "one\n")],
)
def test_a_stop_string_across_pieces(pieces: list[str], shown: str) -> None:
    assert run(pieces, ["\n\n"])[0] == shown


def test_nothing_waits_when_no_stop_string_can_begin() -> None:
    assert StopStrings(["STOP"], include_stop=False).push("hello").text == "hello"


@given(before=letters, after=st.lists(letters, max_size=6), stops=stop_lists)
def test_a_stop_string_that_is_complete_too_early_does_not_count(
    before: str, after: list[str], stops: list[str]
) -> None:
    strings = StopStrings(stops, include_stop=False)
    shown, stop = strings.push(before, may_stop=False).text, None
    for piece in after:
        passed = strings.push(piece)
        shown, stop = shown + passed.text, passed.stop
        if stop is not None:
            break
    text = before + "".join(after)
    late = [match for match in matches(text, stops) if match[0] > len(before)]
    if late:
        _, start, stop_string = min(late)
        assert (shown, stop) == (text[:start], stop_string)
    else:
        assert (shown + strings.finish(), stop) == (text, None)
