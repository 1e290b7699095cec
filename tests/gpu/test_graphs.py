"""Captured decode steps on a GPU: they draw the tokens of steps outside of graphs, with any backend that can be
captured; they stay within their memory; and launching a step, captured or not, never waits for the device."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.metadata import build_common_metadata
from attention.selection import BackendClass
from baton.engine.batch import Batch, BatchRow
from baton.engine.build import BuiltRunner
from baton.engine.device.graphs import DecodeGraphs, GraphSettings, capture_sizes
from baton.engine.device.launched_step import LaunchedStep
from baton.engine.device.runner import ModelRunner
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.spec import KVKind
from baton.models.layers.step_context import StepContext
from baton.settings.config import DEMO_MODELS
from tests.conformance.attention.oracle import relative_error
from tests.conformance.attention.platform_backends import backend_name, backends_here
from tests.conformance.attention.selected import block_sizes_of
from tests.gpu.demo import build_demo
from tests.gpu.waiting import no_waiting
from tests.unit.engine.driver import Driver, runner_of
from tests.unit.engine.test_graphs import row

pytestmark = pytest.mark.gpu

MODELS = ("llama", "deepseek")
GRAPHS = GraphSettings(max_requests=64, max_context_tokens=2048)
# Logits differ by this share of their norm when products have another number of rows.
ERROR = {"float32": 1e-3, "bfloat16": 0.02}

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 5},
    "min_p": {"temperature": 1.5, "min_p": 0.1, "seed": 2**64 - 3},
    "top": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 7},
    "penalised": {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "logprobs": {"logprobs": 3, "temperature": 0.7, "seed": 8},
    "biased": {"logit_bias": {5: 3.0, 9: -100.0}},
}


def demo(model: str, dtype: str, **options: Any) -> BuiltRunner:
    return build_demo(DEMO_MODELS / model, dtype=dtype, num_blocks=512, cuda_graphs=False, **options)


def prepared(built: BuiltRunner, graphs: GraphSettings | None) -> ModelRunner:
    runner = runner_of(built, graphs=graphs)
    runner.prepare()
    return runner


def drive(runner: ModelRunner, samplings: dict[str, dict[str, Any]], *, ahead: bool = True) -> Driver:
    """Requests that arrive one by one, pause and move, over 30 steps."""
    driver = Driver(runner, ahead=ahead)
    names = list(samplings)
    generator = torch.Generator().manual_seed(0)
    for place, (name, sampling) in enumerate(samplings.items()):
        driver.add(name, torch.randint(3, 4000, (5 + 23 * place,), generator=generator).tolist(), **sampling)
    for count in range(1, len(names) + 1):
        driver.step(*names[:count], chunk=64)
    for _ in range(12):
        driver.step(*names, chunk=64)
    for _ in range(4):
        driver.step(*names[1::2])
    driver.move(names[0])
    for _ in range(8):
        driver.step(*reversed(names))
    return driver


@pytest.mark.parametrize("model", MODELS)
def test_captured_steps_draw_the_tokens_of_eager_steps(model: str) -> None:
    built = demo(model, "float32")
    captured, eager = prepared(built, GRAPHS), prepared(built, None)
    ours, theirs = drive(captured, SAMPLINGS), drive(eager, SAMPLINGS)
    for name in SAMPLINGS:
        assert len(theirs.ids(name)) > 15
        assert ours.ids(name) == theirs.ids(name), name


@pytest.mark.parametrize("model", MODELS)
def test_steps_launched_ahead_draw_the_tokens_of_single_steps(model: str) -> None:
    runner = prepared(demo(model, "float32"), GRAPHS)
    ahead, alone = drive(runner, SAMPLINGS, ahead=True), drive(runner, SAMPLINGS, ahead=False)
    for name in SAMPLINGS:
        assert ahead.ids(name) == alone.ids(name), name


BACKENDS = [
    (model, backend)
    for model, kind in zip(MODELS, (KVKind.GQA, KVKind.MLA), strict=True)
    for backend in backends_here(kind)
    # The demo model's latents are not DeepSeek's.
    if backend.capabilities.cudagraph and backend.capabilities.name not in ("FLASHINFER_MLA", "BLOCKSPARSE_FLASH_ATTN")
]


@pytest.mark.parametrize(
    ("model", "backend"), BACKENDS, ids=lambda value: value if isinstance(value, str) else backend_name(value)
)
def test_captured_logits_are_those_of_the_model(model: str, backend: BackendClass) -> None:
    """For every size, full and not, with other lengths than the capture's; and capturing leaves the cache alone."""
    block_size = block_sizes_of(backend)[0]
    dtype = "float32" if "float32" in backend.capabilities.dtypes else "bfloat16"
    built = demo(model, dtype, attention_backend=backend.capabilities.name, block_size=block_size)
    blocks_each = -(-300 // block_size)
    shape = replace(built.cache.shape, num_blocks=GRAPHS.max_requests * blocks_each)
    cache = PagedKVCache(built.cache.spec, shape, built.cache.view.device)
    cache.storage.normal_()
    before = cache.storage.clone()
    graphs = DecodeGraphs(built.runner.model, built.runner.backend, cache, GRAPHS)
    with torch.inference_mode():
        graphs.capture()
    assert graphs.sizes == capture_sizes(GRAPHS.max_requests)
    slots = graphs.new_slots()
    assert torch.equal(cache.storage, before)
    blocks = torch.randperm(shape.num_blocks, generator=torch.Generator().manual_seed(0)).view(-1, blocks_each).tolist()
    for size in graphs.sizes:
        for num_rows in {size, (size + 1) // 2}:
            rows = [row(100 + place, (37 * place + size) % 299, blocks[place]) for place in range(num_rows)]
            with torch.inference_mode():
                logits_RV = graphs.launch(rows, size, step=0, slot=slots.take())[:num_rows].clone()
            assert graphs.buffers.sampled[:num_rows].tolist() == logits_RV.argmax(dim=1).tolist()
            written = cache.storage.clone()
            cache.storage.copy_(before)
            error = relative_error(logits_RV.cpu(), expected_logits(built, cache, rows).cpu())
            assert error < ERROR[dtype], (size, num_rows)
            assert relative_error(written.cpu(), cache.storage.cpu()) < ERROR[dtype], (size, num_rows)
            cache.storage.copy_(before)


def test_a_batch_above_the_largest_size_runs_outside_of_graphs() -> None:
    built = demo("llama", "float32")
    small, eager = prepared(built, replace(GRAPHS, largest=4)), prepared(built, None)
    ours, theirs = drive(small, SAMPLINGS), drive(eager, SAMPLINGS)
    for name in SAMPLINGS:
        assert ours.ids(name) == theirs.ids(name), name


def test_graphs_take_no_more_memory_than_they_may(caplog: pytest.LogCaptureFixture) -> None:
    built = demo("llama", "bfloat16")
    graphs = runner_of(built, graphs=replace(GRAPHS, memory_bytes=1))
    with caplog.at_level(logging.INFO):
        graphs.prepare()
    assert "captured decode steps of 64 rows" in caplog.text
    assert f"{len(capture_sizes(64)) - 1} of {len(capture_sizes(64))} sizes are not captured" in caplog.text


@pytest.mark.parametrize("graphs", [GRAPHS, None], ids=["graphs", "eager"])
@pytest.mark.parametrize("model", MODELS)
def test_launching_waits_for_nothing_on_the_device(model: str, graphs: GraphSettings | None) -> None:
    """Neither a call that torch knows to wait nor any other one: the device is busy long after each launch returns.
    A first drive does the one-time allocations and compilations."""
    runner = prepared(demo(model, "bfloat16"), graphs)
    drive(runner, SAMPLINGS)
    driver = _BusyDriver(runner)
    for name, sampling in SAMPLINGS.items():
        driver.add(name, [5, 6, 7, 8], **sampling)
    for _ in range(4):
        driver.step(*SAMPLINGS)
    assert driver.launches == 4
    assert all(len(driver.ids(name)) == 4 for name in SAMPLINGS)


class _BusyDriver(Driver):
    """Launches each step after device work that takes longer than a launch; counts the launches."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner, ahead=True)
        self.launches = 0

    def launch(self, batch: Batch) -> LaunchedStep:
        torch.cuda._sleep(400_000_000)  # cycles: a fifth of a second
        busy = torch.cuda.Event()
        busy.record()
        with no_waiting():
            step = super().launch(batch)
        assert not busy.query()
        self.launches += 1
        return step


@torch.inference_mode()
def expected_logits(built: BuiltRunner, cache: PagedKVCache, rows: list[BatchRow]) -> Tensor:
    common, positions_R = build_common_metadata(
        query_lens=[1] * len(rows),
        context_lens=[each.token_start for each in rows],
        block_tables=[each.block_ids for each in rows],
        block_size=cache.shape.block_size,
        device=cache.view.device,
    )
    token_ids_R = torch.tensor([each.token_ids[0] for each in rows], device=cache.view.device)
    metadata = built.runner.backend.builder.build(0, common)
    hidden_RD = built.runner.model.compute(token_ids_R, positions_R, cache, StepContext(metadata))
    return built.runner.model.compute_logits(hidden_RD)
