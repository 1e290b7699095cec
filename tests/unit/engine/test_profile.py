"""How a GPU's memory is shared out and its step size chosen: the arithmetic, from numbers as a profile gives them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import ConfigError
from engine.batch import Batch
from engine.device.layer_marks import OnMark
from engine.device.profile import DeviceMemory, MemoryPlan, Profile, choose_step_tokens, plan_memory, profile_runner
from engine.device.runner import LaunchedStep, ModelRunner
from tests.unit.engine.tiny import build

GIB = 1 << 30
PROFILE = Profile({1024: 0.1}, step_bytes=2 * GIB, decode_bytes=GIB // 4)
MEMORY = DeviceMemory(total=100 * GIB, used=15 * GIB, free=84 * GIB)


def planned(
    memory: DeviceMemory = MEMORY, *, fraction: float = 0.9, graphs: bool = True, least_bytes: int = GIB
) -> MemoryPlan:
    return plan_memory(memory, PROFILE, fraction=fraction, reserved_bytes=GIB, graphs=graphs, least_bytes=least_bytes)


def test_the_smallest_step_that_is_nearly_as_fast_as_the_fastest_is_chosen() -> None:
    assert choose_step_tokens({512: 0.020, 1024: 0.030, 2048: 0.058, 4096: 0.115}) == 1024
    assert choose_step_tokens({512: 0.020, 1024: 0.021, 2048: 0.023}) == 2048
    assert choose_step_tokens({300: 1.0}) == 300


def test_the_parts_fill_the_fraction_exactly() -> None:
    plan = planned()
    assert plan.weights + plan.kv_cache + plan.steps + plan.graphs + plan.reserved == 90 * GIB
    assert planned(graphs=False).kv_cache == plan.kv_cache + plan.graphs


def test_what_others_have_taken_is_not_promised() -> None:
    crowded = DeviceMemory(total=100 * GIB, used=15 * GIB, free=30 * GIB)
    plan = planned(crowded)
    assert plan.kv_cache + plan.steps + plan.graphs + plan.reserved == 30 * GIB


def test_two_nodes_with_half_a_fraction_each_fit_on_one_gpu() -> None:
    first = planned(fraction=0.45)
    second = planned(DeviceMemory(total=100 * GIB, used=15 * GIB, free=(100 - 45 - 15) * GIB), fraction=0.45)
    assert second == first


def test_too_little_for_a_cache_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="MiB are left for the KV cache") as raised:
        planned(fraction=0.2, least_bytes=2 * GIB)
    assert raised.value.field == "gpu_memory_fraction"
    assert "--max-batch-tokens" in raised.value.cure


def test_a_plan_reads_as_a_list_of_its_parts() -> None:
    assert str(planned()).startswith("weights 15.0 GiB, KV cache 71.0 GiB, steps 2.0 GiB")


class SecondGpu:
    """Stands for `torch.cuda` while the thread's current GPU is another one than the model's: only who names the
    second one sees the memory that its steps take."""

    DEVICE = torch.device("cuda", 1)
    WEIGHTS, STEP = 16 * GIB, GIB

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._peak = self.WEIGHTS
        for name in ("synchronize", "memory_allocated", "reset_peak_memory_stats", "max_memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def step(self) -> None:
        self._peak = self.WEIGHTS + self.STEP

    def synchronize(self, device: Any = None) -> None:
        del device

    def memory_allocated(self, device: Any = None) -> int:
        return self.WEIGHTS if device == self.DEVICE else 0

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        if device == self.DEVICE:
            self._peak = self.WEIGHTS

    def max_memory_allocated(self, device: Any = None) -> int:
        del device  # the step has made the model's GPU the current one
        return self._peak


def profiled(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, *, max_batch_requests: int
) -> tuple[Profile, list[Batch]]:
    gpu, batches = SecondGpu(monkeypatch), list[Batch]()

    class Counted(ModelRunner):
        def launch(self, batch: Batch, on_mark: OnMark | None = None) -> LaunchedStep:
            batches.append(batch)
            gpu.step()
            return super().launch(batch, on_mark)

    monkeypatch.setattr(runner, "__class__", Counted)
    return profile_runner(runner, (8, 64), max_batch_requests=max_batch_requests, device=gpu.DEVICE), batches


def test_a_profile_measures_the_gpu_of_the_model(llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    profile, _ = profiled(build(llama[0]).runner, monkeypatch, max_batch_requests=3)
    assert (profile.step_bytes, profile.decode_bytes) == (GIB, GIB)
    assert list(profile.step_s) == [8, 64]


def test_a_profile_runs_no_more_requests_than_a_step_may_have(
    llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some backends have room for so many."""
    runner = build(llama[0]).runner
    runner.facts = runner.facts.__class__(**{**vars(runner.facts), "max_context_tokens": 16})
    profile, batches = profiled(runner, monkeypatch, max_batch_requests=3)
    assert max(len(batch.rows) for batch in batches) == 3
    assert list(profile.step_s) == [8, 48]
