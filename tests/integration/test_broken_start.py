"""A rank that fails before its node serves, at whatever stage and however, ends the whole node, with the reason last."""

import subprocess
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from tests.integration.broken_start import BROKEN, OF_RANK_0, STAGES, StartFault, break_start
from tests.integration.cluster import LLAMA, Flags, arguments
from tests.integration.test_ranks import until_gone
from tests.warm import run_warm

NODE: Flags = {"model": LLAMA, "device": "cpu", "num_blocks": 64, "tensor_parallel_size": 2, "listen": "127.0.0.1:0"}
BY_ITSELF = {"error": (1, BROKEN), "setting": (2, BROKEN), "memory": (1, BROKEN)}
BY_OTHERS = {
    "exit": (1, "rank 1 (pid {}) ended with exit code 7: this node ends"),
    "kill": (1, "rank 1 (pid {}) was ended by SIGKILL: this node ends"),
    "stop": (1, "rank 1 (pid {}) is stopped by a signal (SIGSTOP) while the model loads: this node ends"),
}


def run_broken(stage: str, rank: int, way: str, folder: Path) -> tuple[subprocess.CompletedProcess[str], list[int]]:
    """The node as it ended, and the processes of its ranks, the leader's first."""
    fault = StartFault(stage, rank, way, str(folder))
    ended = run_warm(
        "decode_node", *arguments({**NODE, "ready_file": folder / "ready"}), prepare=partial(break_start, fault)
    )
    pids = [int(path.name) for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)]
    return ended, pids


def check(stage: str, rank: int, way: str, folder: Path) -> None:
    ended, pids = run_broken(stage, rank, way, folder)
    until_gone(pids)
    code, reason = {**BY_ITSELF, **BY_OTHERS}[way]
    assert ended.returncode == code, ended.stderr
    lines = ended.stderr.splitlines()
    assert reason.format(pids[-1]) in lines[-1], ended.stderr
    assert sum(BROKEN in line and not line.startswith("    ") for line in lines) == (way in BY_ITSELF), ended.stderr


def test_rank_0_without_memory_for_its_weights_ends_its_node(tmp_path: Path) -> None:
    check("weights", 0, "memory", tmp_path)


def test_a_rank_without_memory_for_its_weights_ends_its_node(tmp_path: Path) -> None:
    check("weights", 1, "memory", tmp_path)


STAGES_OF_ALL = [
    (stage, rank) for stage, rank in product(STAGES, (0, 1)) if stage not in OF_RANK_0 or rank == 0
    if (stage, rank) != ("import", 0)
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "rank"), STAGES_OF_ALL)
@pytest.mark.parametrize("way", ["error", "setting", "memory"])
def test_an_error_at_any_stage_on_any_rank_ends_the_node(stage: str, rank: int, way: str, tmp_path: Path) -> None:
    if stage == "import":
        pytest.skip("a rank that cannot be imported shows Python's own traceback")
    check(stage, rank, way, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage not in OF_RANK_0])
@pytest.mark.parametrize("way", BY_OTHERS)
def test_a_rank_that_is_gone_at_any_stage_ends_its_node(stage: str, way: str, tmp_path: Path) -> None:
    check(stage, 1, way, tmp_path)
