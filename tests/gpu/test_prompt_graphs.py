"""Captured steps with prompts on a GPU: for any mix of decodes and prompts they give the tokens and the KV of steps
outside of graphs, wait for nothing, keep their memory, and have marks between their parts."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.core.types import TokenOutput
from baton.engine.batch import Batch
from baton.engine.build import BuiltRunner
from baton.engine.device.capture import Recorder
from baton.engine.device.graphs import GraphSettings
from baton.engine.device.layer_marks import LayerMark
from baton.engine.device.prompt_graphs import token_sizes
from baton.engine.device.runner import ModelRunner
from baton.settings.config import DEMO_MODELS
from tests.conformance.attention.oracle import relative_error
from tests.gpu.demo import build_demo
from tests.gpu.test_graphs import SAMPLINGS, drive, prepared
from tests.gpu.waiting import no_waiting
from tests.unit.engine.driver import runner_of
from tests.unit.engine.test_layer_marks import batch_of
from tests.unit.engine.test_prompt_graphs import mixed_steps, row
from tests.unit.models.tiny import save_tiny

pytestmark = pytest.mark.gpu

GRAPHS = GraphSettings(max_requests=64, max_context_tokens=2048, max_tokens=256)
LATENT = ("deepseek-v2", "deepseek-v3")
FAMILIES = ("llama", "mistral-window", "qwen3", "gemma2", "gemma3", "llama4", "gpt-oss", "bloom", *LATENT)


def demo(dtype: str = "bfloat16", **options: Any) -> BuiltRunner:
    return build_demo(DEMO_MODELS / "llama", dtype=dtype, cuda_graphs=False, **options)


def prompts_of(runner: ModelRunner) -> list[int]:
    """The captured sizes."""
    assert runner._prompts is not None
    return runner._prompts.sizes


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "alone"])
def test_captured_steps_draw_the_tokens_of_eager_steps(ahead: bool) -> None:
    built = demo("float32")
    captured, eager = prepared(built, GRAPHS), prepared(built, None)
    assert prompts_of(captured) == token_sizes(256)
    ours, theirs = drive(captured, SAMPLINGS, ahead=ahead), drive(eager, SAMPLINGS, ahead=ahead)
    for name in SAMPLINGS:
        assert len(theirs.ids(name)) > 15
        assert ours.ids(name) == theirs.ids(name), name


def test_a_step_that_would_take_the_memory_of_smaller_ones_is_not_captured() -> None:
    sizes = token_sizes(2048)
    prompts = prepared(demo(), replace(GRAPHS, max_tokens=2048))._prompts
    assert prompts is not None
    assert prompts.sizes == sizes
    recorder = Recorder(prompts._device)
    batch = prompts.buffers.padded(2048)
    build = prompts._backend.builder.build_padded
    needed = recorder.needs(lambda: prompts._run(2048, lambda: build(batch)))
    assert needed > 2048 * prompts.buffers.hidden.shape[1] * prompts.buffers.hidden.element_size()
    half = [size for size in sizes if size <= 1024]
    for room, kept in ((None, sizes), (4 * needed, sizes), (3 * needed // 2, half)):
        prompts._settings = replace(prompts._settings, memory_bytes=room)
        assert prompts._fitting(recorder, 0) == kept


def tokens_of(runner: ModelRunner, batch: Batch) -> list[int | None]:
    results = runner.run(batch)
    return [result.token_id if isinstance(result, TokenOutput) else None for result in results]


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_the_same_tokens_and_kv(family: str, kv_dtype: str, tmp_path: Path) -> None:
    """In float32, where rounding changes no token."""
    save_tiny(family, tmp_path)
    built = build_tiny(tmp_path, dtype="float32", kv_cache_dtype=kv_dtype)
    graphs = replace(GRAPHS, max_requests=8, max_context_tokens=96, max_tokens=48)
    captured, eager = prepared(built, graphs), prepared(built, None)
    assert prompts_of(captured) == [16, 32, 48]
    for runner in (captured, eager):
        runner._cache.storage.zero_()
    assert captured.backend.builder.captures_context == (family not in LATENT)
    for batch in mixed_steps(12, whole=family in LATENT):
        assert tokens_of(captured, batch) == tokens_of(eager, batch)
    assert captured.launches["prompt_graph"] > 4
    assert relative_error(kv_of(captured), kv_of(eager)) < (1e-3 if kv_dtype == "auto" else 0.02)


def build_tiny(directory: Path, **options: Any) -> BuiltRunner:
    return build_demo(directory, num_blocks=64, block_size=4, cuda_graphs=False, **options)


def kv_of(runner: ModelRunner) -> Tensor:
    return runner._cache.storage.float().cpu()


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["", "invariant"])
def test_kernels_for_this_gpu_give_the_same_kv_in_bfloat16(batch_invariant: bool) -> None:
    """Later layers' KV depends on the attention of all earlier ones. Batch-invariant results have the same bits."""
    built = demo(batch_invariant=batch_invariant)
    captured, eager = prepared(built, GRAPHS), prepared(built, None)
    steps = [
        Batch(0, (row(200),)),
        Batch(1, (row(1, start=200), row(30, start=201))),
        Batch(2, (row(1, start=200), row(1, start=150), row(17, start=231), row(90), row(2, start=40))),
        Batch(3, tuple(row(1, start=10 + place) for place in range(40))),
    ]
    for runner in (captured, eager):
        runner._cache.storage.zero_()
    for step in steps:
        # All rows share blocks: no two rows of a step write to the same slot, and what they write is the same.
        captured.run(step)
        eager.run(step)
        if batch_invariant:
            assert torch.equal(captured._cache.storage, eager._cache.storage)
        else:
            assert relative_error(kv_of(captured), kv_of(eager)) < 0.02


def test_capturing_leaves_the_cache_alone_and_padding_is_never_nan() -> None:
    runner = runner_of(demo(), graphs=GRAPHS)
    assert runner._prompts is not None
    with torch.inference_mode():
        runner._prompts.capture()
    assert runner._cache.storage.isnan().all()
    runner.run(Batch(0, (row(20),)))
    assert not runner._prompts.buffers.hidden[:32].isnan().any()


def test_launching_waits_for_nothing_on_the_device() -> None:
    runner = prepared(demo(), GRAPHS)
    step = Batch(0, (row(1, start=5), row(100), row(40, start=3)))
    for _ in range(3):
        runner.run(step)
    torch.cuda._sleep(400_000_000)  # cycles: a fifth of a second
    busy = torch.cuda.Event()
    busy.record()
    with no_waiting():
        launched = runner.launch(step)
    assert not busy.query()
    assert len(launched.wait()) == 3


def test_memory_stays_flat_while_decodes_and_prompts_alternate() -> None:
    runner = prepared(demo(), GRAPHS)
    steps = [*(Batch(0, (row(1, start=7), row(count))) for count in (3, 90, 200, 250)), Batch(0, (row(1, start=8),))]
    for step in steps * 2:
        runner.run(step)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    for step in steps * 10:
        runner.run(step)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_reserved(), torch.cuda.memory_allocated()) == before


def test_graphs_of_prompts_take_no_more_memory_than_they_may(caplog: pytest.LogCaptureFixture) -> None:
    runner = prepared(demo(), replace(GRAPHS, memory_bytes=1))
    assert prompts_of(runner) == []
    assert "sizes of steps with prompts are not captured" in caplog.text
    assert isinstance(runner.run(Batch(0, (row(9),)))[0], TokenOutput)


def test_capture_logs_its_cost(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        prepared(demo(), GRAPHS)
    assert "captured steps of 16, 32, 64, 96, 128, 192, 256 tokens with prompts" in caplog.text


def test_a_captured_step_has_marks_between_its_parts() -> None:
    runner = prepared(demo(), GRAPHS)
    cache = runner._cache
    marks: list[LayerMark] = []
    seen: list[Tensor] = []

    def on_mark(mark: LayerMark) -> None:
        torch.cuda._sleep(50_000_000)  # cycles: later layers run clearly after the mark
        marks.append(mark)

    runner.launch(batch_of(runner, layers_per_group=1), lambda mark: None).wait()
    cache.storage.fill_(float("nan"))
    step = runner.launch(batch_of(runner, layers_per_group=1), on_mark)
    end = torch.cuda.Event()
    end.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        for mark in marks:
            mark.wait()
            assert not end.query()
            seen.append(torch.stack([cache.layer(layer) for layer in range(mark.layer_stop)]).cpu())
    step.wait()
    # Six layers in parts of two.
    assert [mark.layer_stop for mark in marks] == [2, 4]
    for mark, kv in zip(marks, seen, strict=True):
        now = torch.stack([cache.layer(layer) for layer in range(mark.layer_stop)]).cpu()
        assert torch.equal(kv.nan_to_num(-1), now.nan_to_num(-1))
        assert not kv.isnan().all()


def test_default_settings_capture_steps_with_prompts() -> None:
    built = build_demo(DEMO_MODELS / "llama", dtype="bfloat16", max_batch_tokens=320)
    built.runner.prepare()
    assert prompts_of(built.runner) == token_sizes(320)
