"""A profile's measurements on a real GPU."""

import pytest
import torch

from baton.engine.calibration import calibrate
from baton.engine.device.profile import prefill_step, profile_runner
from baton.engine.device.step_costs import STEP_TOKENS
from baton.settings.config import DEMO_MODELS
from baton.settings.node_config import DecodeSettings
from tests.gpu.demo import build_demo, generate
from tests.unit.engine.tiny import greedy

pytestmark = pytest.mark.gpu


def test_a_profile_reports_the_memory_that_its_largest_step_takes() -> None:
    runner = build_demo(DEMO_MODELS / "llama").runner
    device = torch.device("cuda", torch.cuda.current_device())
    largest = prefill_step(256, runner.facts, max_batch_requests=4)
    # The first run of a process allocates the libraries' workspaces, 33 MB, which later runs reuse.
    runner.run(largest)
    profile = profile_runner(runner, 256, max_batch_requests=4, device=device)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.run(largest)
    # The allocator hands out whole blocks, so two equal steps differ by some kilobytes.
    taken = torch.cuda.max_memory_allocated(device) - before
    assert profile.step_bytes == pytest.approx(taken, rel=0.02)
    assert 0 < profile.decode_bytes <= profile.step_bytes


def test_a_node_measures_its_captured_steps_and_then_serves_as_before() -> None:
    prompts = [[3, 4, 5, 6], list(range(3, 80))]
    expected = generate(build_demo(DEMO_MODELS / "llama"), prompts, greedy(16))
    settings = DecodeSettings(model=DEMO_MODELS / "llama", device="cuda", num_blocks=2048)
    built = calibrate(build_demo(DEMO_MODELS / "llama", num_blocks=2048, max_batch_tokens=None), settings)
    assert built.costs is not None
    assert built.limits.max_batch_tokens in STEP_TOKENS
    # Launching even the smallest step takes the host microseconds, and no step of a demo model takes a second.
    assert 1e-6 < built.costs.dense_s(1) <= built.costs.dense_s(max(STEP_TOKENS)) < 1.0
    assert generate(built, prompts, greedy(16)) == expected
