"""Decode steps whose kernels overlap also end under a profiler, which changes when kernels start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from baton.engine.build import build_runner
from baton.settings.node_config import NodeSettings
from bench.engine.run import CONFIGS
from bench.engine.steps import decode_ms

pytestmark = pytest.mark.gpu

LAYERS = 4
REQUESTS = (1, 8, 32)
TIMES = 5
LIMIT_S = 100


def test_steps_of_latent_attention_and_experts_end_under_a_profiler(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "deepseek-v2-lite" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    # In its own process: only the end of the process frees a GPU on which a kernel hangs.
    command = [sys.executable, "-m", __name__, str(tmp_path)]
    child = subprocess.run(command, timeout=LIMIT_S, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr


def _profile_steps(directory: Path) -> None:
    built = build_runner(
        NodeSettings(
            model=directory,
            device="cuda",
            load_format="dummy",
            block_size=64,
            num_blocks=2048,
            max_batch_requests=max(REQUESTS),
            attention_backend="TRITON_MLA",
        )
    )
    built.runner.prepare()
    for requests in REQUESTS:
        for _ in range(TIMES):
            with profile(activities=[ProfilerActivity.CUDA]):
                decode_ms(built.runner, requests=requests, context=1024, steps=100)
            torch.cuda.synchronize()
        print(f"{requests} requests: done", flush=True)


if __name__ == "__main__":
    _profile_steps(Path(sys.argv[1]))
