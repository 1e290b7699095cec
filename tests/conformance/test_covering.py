"""Pairwise covering, against all rows of small spaces."""

from itertools import combinations
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.covering import Row, Rule, Space, covering, pairs_of


def pairs_in(row: Row) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    """Up to five parameters, and rules that forbid some combinations of two or three of them."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    parameters = {f"p{number}": tuple(range(size)) for number, size in enumerate(sizes)}
    rules = []
    for _ in range(draw(st.integers(0, 3))):
        names = draw(st.lists(st.sampled_from(list(parameters)), min_size=2, max_size=3, unique=True))
        choice = st.tuples(*(st.sampled_from(parameters[name]) for name in names))
        forbidden = draw(st.frozensets(choice, max_size=6))
        rules.append(Rule(tuple(names), lambda *values, forbidden=forbidden: values not in forbidden))
    return Space(parameters, tuple(rules))


@settings(max_examples=60, deadline=None)
@given(spaces())
def test_all_pairs_that_any_row_has_are_covered_by_rows_of_the_space(space: Space) -> None:
    possible, rows = list(space.rows()), covering(space)
    assert all(row in possible for row in rows)
    wanted = {pair for row in possible for pair in pairs_in(row)}
    assert {pair for row in rows for pair in pairs_in(row)} == wanted
    assert len(pairs_of(space)) == len(wanted)
    assert covering(Space(space.parameters, space.rules)) == rows, "not the same every time"


def test_a_row_that_a_chain_of_rules_forbids_is_not_looked_for() -> None:
    """No rule names both a and c, and yet their 1 never meet."""
    space = Space(
        {"a": (0, 1), "b": (0, 1), "c": (0, 1), "d": (0, 1)},
        (Rule(("a", "b"), lambda a, b: a == b), Rule(("b", "c"), lambda b, c: b != c)),
    )
    assert not space.has_row_with({"a": 1, "c": 1})
    assert space.has_row_with({"a": 1, "c": 0, "d": 1})
    assert all(row["a"] == row["b"] != row["c"] for row in covering(space))


def test_rows_are_few() -> None:
    """Ten parameters of four values have a million rows; no fewer than 16 can do."""
    space = Space({f"p{number}": (0, 1, 2, 3) for number in range(10)})
    assert len(covering(space)) <= 40
