"""Two GPUs whose ranks fail while they load: NCCL's own teardown does not keep their node from ending."""

import signal
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from baton.settings.config import DEMO_MODELS
from tests.gpu.test_ranks import NODE
from tests.integration.broken_start import BROKEN, StartFault, break_start, pids_in
from tests.integration.cluster import arguments
from tests.integration.test_ranks import until_gone
from tests.warm import run_warm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

FLAGS = {
    **NODE,
    "model": DEMO_MODELS / "deepseek",
    "tensor_parallel_size": 2,
    "expert_parallel": True,
    "attention_data_parallel": True,
}
# Between the last two, graphs are captured that NCCL is part of.
STAGES = ("process group", "weights", "cache", "calibration", "transport")


@pytest.mark.parametrize(("stage", "rank"), [*product(STAGES, (0, 1))])
def test_a_rank_that_fails_while_it_loads_ends_its_node(stage: str, rank: int, tmp_path: Path) -> None:
    fault = StartFault(stage, rank, "memory", tmp_path, hangs=False)
    ended = run_warm("decode_node", *arguments(FLAGS), prepare=partial(break_start, fault))
    until_gone(pids_in(tmp_path))
    assert ended.returncode == 1, ended.stderr
    assert BROKEN in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize(("stage", "rank"), [*product(("weights", "calibration", "transport"), (0, 1))])
def test_a_rank_that_is_killed_while_it_loads_ends_its_node(stage: str, rank: int, tmp_path: Path) -> None:
    fault = StartFault(stage, rank, "kill", tmp_path, hangs=False)
    ended = run_warm("decode_node", *arguments(FLAGS), prepare=partial(break_start, fault))
    until_gone(pids_in(tmp_path))
    assert ended.returncode == (-signal.SIGKILL if rank == 0 else 1), ended.stderr
    assert rank == 0 or "was ended by SIGKILL: this node ends" in ended.stderr.splitlines()[-1]
