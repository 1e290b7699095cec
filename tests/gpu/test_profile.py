"""A profile's measurements on a real GPU."""

import pytest
import torch

from baton.config import DEMO_MODELS
from engine.device.profile import prefill_steps, profile_runner
from tests.gpu.demo import build_demo

pytestmark = pytest.mark.gpu


def test_a_profile_reports_the_memory_that_its_largest_step_takes() -> None:
    runner = build_demo(DEMO_MODELS / "llama").runner
    device = torch.device("cuda", torch.cuda.current_device())
    largest = prefill_steps((256,), runner.facts, max_batch_requests=4)[256]
    # The first run of a process allocates the libraries' workspaces, 33 MB, which later runs reuse.
    runner.run(largest)
    profile = profile_runner(runner, (32, 256), max_batch_requests=4, device=device)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.run(largest)
    assert profile.step_bytes == torch.cuda.max_memory_allocated(device) - before > 0
    assert 0 < profile.decode_bytes <= profile.step_bytes
    assert list(profile.step_s) == [32, 256]
