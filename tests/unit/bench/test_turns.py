"""What the benchmark of conversations shows."""

from bench.turns import LOADS, Turn, table


def test_a_table_shows_what_was_computed_again() -> None:
    turns = [Turn(1, 100, 0, 0, 0, 0.5), Turn(2, 200, 150, 120, 64, 0.1), Turn(2, 200, 150, 180, 0, 0.3)]
    lines = list(table(turns))
    assert lines[2] == "| 1 | 1 | 100 | 500 | 500 |  | 0 |"
    assert lines[3] == "| 2 | 2 | 200 | 200 | 298 | 90.0 % | 64 |"
    assert lines[-1] == "90.00 % of earlier tokens were not computed again."


def test_the_loads_fit_into_the_context_of_llama() -> None:
    for script in LOADS.values():
        longest = script.document + script.turns * (script.question + script.answer)
        assert longest <= 131072
