"""The cores that a process may use: its affinity, and the CPU limit of its container or service."""

from pathlib import Path

import pytest

from baton.core.cores import usable_cores


def machine(root: Path, **files: str) -> Path:
    """Files below a root; two underscores in a name stand for a slash."""
    for name, text in files.items():
        file = root / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_without_a_limit_a_process_may_use_the_cores_that_it_may_run_on(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, affinity=6) == 6.0
    machine(tmp_path, sys__fs__cgroup__cpu_dot_max="max 100000\n")
    assert usable_cores(tmp_path, affinity=6) == 6.0


def test_the_limit_of_a_container_counts_where_it_is_the_lower_one(tmp_path: Path) -> None:
    machine(tmp_path, sys__fs__cgroup__cpu_dot_max="250000 100000\n")
    assert usable_cores(tmp_path, affinity=64) == 2.5
    assert usable_cores(tmp_path, affinity=1) == 1.0


def test_the_limit_of_a_service_and_of_the_groups_above_it_count_too(tmp_path: Path) -> None:
    machine(tmp_path, proc__self__cgroup="0::/system.slice/baton.service\n")
    machine(tmp_path, **{"sys__fs__cgroup__system.slice__baton.service__cpu_dot_max": "800000 100000\n"})
    assert usable_cores(tmp_path, affinity=64) == 8.0
    machine(tmp_path, **{"sys__fs__cgroup__system.slice__cpu_dot_max": "400000 100000\n"})
    assert usable_cores(tmp_path, affinity=64) == 4.0


def test_the_limit_of_version_1_counts(tmp_path: Path) -> None:
    folder = "sys__fs__cgroup__cpu__cpu_dot_cfs"
    machine(tmp_path, **{f"{folder}_quota_us": "200000\n", f"{folder}_period_us": "100000\n"})
    assert usable_cores(tmp_path, affinity=64) == 2.0
    machine(tmp_path, **{f"{folder}_quota_us": "-1\n"})
    assert usable_cores(tmp_path, affinity=64) == 64.0


@pytest.mark.parametrize("text", ["", "0 0\n", "100000 0\n", "what\n", "1 2 3\n", "x 100000\n"])
def test_a_limit_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    machine(tmp_path, sys__fs__cgroup__cpu_dot_max=text, proc__self__cgroup="0::/../../etc\n")
    assert usable_cores(tmp_path, affinity=3) == 3.0
