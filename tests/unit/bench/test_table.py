"""Rows of figures, written and read again."""

from pathlib import Path

from bench.table import Row, read_json, write_json

ROWS = [
    Row("decode", "B 1", 12.5, "us", "a rival", 10.0, goal=0.8, less_is_better=True),
    Row("copy", "2 GiB", 4200.0, "GB/s"),
    Row("ratio", "two densities", 1.2, "x", limit=1.3),
]


def test_a_time_reaches_the_rivals_time_over_its_own() -> None:
    assert ROWS[0].share == 0.8
    assert ROWS[0].reached


def test_rows_come_back_from_json_as_they_were(tmp_path: Path) -> None:
    write_json(ROWS, tmp_path / "new" / "rows.json")
    assert read_json(tmp_path / "new" / "rows.json") == ROWS
