"""The memory that a process may use."""

from pathlib import Path

from baton.core.memory import free_memory_bytes, memory_limit_bytes


def test_the_containers_limit_counts_where_it_is_the_lower_one(tmp_path: Path) -> None:
    none, low, high, endless = (tmp_path / name for name in ("none", "low", "high", "endless"))
    low.write_text("1048576\n")
    high.write_text(f"{1 << 60}\n")
    endless.write_text("max\n")
    whole = memory_limit_bytes([none, endless, high])
    assert 1 << 20 < whole < 1 << 60
    assert memory_limit_bytes([none, low, endless]) == 1 << 20


def test_free_memory_is_what_the_machine_has_free_and_the_container_leaves(tmp_path: Path) -> None:
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text("MemTotal:  4000000 kB\nMemFree:  1 kB\nMemAvailable:   2000000 kB\n")
    assert free_memory_bytes([limit], meminfo) == 2000000 << 10, "no container"
    limit.write_text("max\n")
    assert free_memory_bytes([limit], meminfo) == 2000000 << 10, "no limit"
    limit.write_text(f"{1 << 30}\n")
    assert free_memory_bytes([limit], meminfo) == 1 << 30, "nothing says how much is in use"
    (tmp_path / "memory.current").write_text(f"{900 << 20}\n")
    assert free_memory_bytes([limit], meminfo) == 124 << 20
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {300 << 20}\ntotal_inactive_file 7\n")
    assert free_memory_bytes([limit], meminfo) == 424 << 20, "cached files make room"
    (tmp_path / "memory.current").write_text(f"{2 << 30}\n")
    assert free_memory_bytes([limit], meminfo) == 0


def test_an_older_kernels_container_is_understood_too(tmp_path: Path) -> None:
    limit = tmp_path / "memory.limit_in_bytes"
    limit.write_text(f"{1 << 20}\n")
    (tmp_path / "memory.usage_in_bytes").write_text(f"{1 << 19}\n")
    (tmp_path / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {1 << 18}\n")
    assert free_memory_bytes([limit], tmp_path / "none") == (1 << 19) + (1 << 18)
    assert 0 < free_memory_bytes() <= memory_limit_bytes()
