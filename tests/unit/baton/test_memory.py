"""The memory that a process may use."""

from pathlib import Path

from baton.core.memory import memory_limit_bytes


def test_the_containers_limit_counts_where_it_is_the_lower_one(tmp_path: Path) -> None:
    none, low, high, endless = (tmp_path / name for name in ("none", "low", "high", "endless"))
    low.write_text("1048576\n")
    high.write_text(f"{1 << 60}\n")
    endless.write_text("max\n")
    whole = memory_limit_bytes([none, endless, high])
    assert 1 << 20 < whole < 1 << 60
    assert memory_limit_bytes([none, low, endless]) == 1 << 20
