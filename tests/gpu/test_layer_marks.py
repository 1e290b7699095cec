"""On a GPU a step is queued long before it runs. At a mark the first layers' KV is in the cache while the step still
runs, also for a stream that is not ordered after the step's stream."""

import pytest
import torch

from baton.core.sampling import ResolvedSampling
from baton.engine.batch import Batch, BatchRow
from baton.engine.device.layer_marks import LayerMark
from baton.engine.request import int_array
from baton.engine.sampling.row import SampleRow
from baton.settings.config import DEMO_MODELS
from tests.gpu.demo import build_demo
from tests.unit.engine.tiny import prompt_of

pytestmark = pytest.mark.gpu

TOKENS = 250


@pytest.mark.parametrize("model", ["llama", "deepseek"])
def test_marked_layers_are_complete_while_later_ones_compute(model: str) -> None:
    built = build_demo(DEMO_MODELS / model, cuda_graphs=False)
    runner, cache = built.runner, built.cache
    runner.prepare()
    num_blocks = -(-TOKENS // runner.facts.block_size)
    blocks = list(range(num_blocks))
    sample = SampleRow(ResolvedSampling(temperature=0.0), 0, (), int_array(), TOKENS)
    row = BatchRow("", int_array(prompt_of(TOKENS)), 0, int_array(blocks), sample)

    def written(layer_stop: int) -> torch.Tensor:
        """[layers, K and V, blocks, ...] on the CPU."""
        return torch.stack([cache.layer(layer)[:, blocks] for layer in range(layer_stop)]).cpu()

    # The first run compiles and loads kernels, which waits for all queued work.
    runner.launch(Batch(0, (row,)), lambda mark: None).wait()
    written(cache.spec.num_layers)
    cache.storage.fill_(float("nan"))
    torch.cuda.synchronize()
    marks: list[LayerMark] = []

    def on_mark(mark: LayerMark) -> None:
        torch.cuda._sleep(50_000_000)  # cycles: later layers run clearly after the mark
        marks.append(mark)

    step = runner.launch(Batch(0, (row,), layers_per_group=1), on_mark)
    step_end = torch.cuda.Event()
    step_end.record()
    seen = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for mark in marks:
            mark.wait()
            assert not step_end.query()
            seen.append(written(mark.layer_stop))
    step.wait()
    assert [mark.layer_stop for mark in marks] == list(range(1, cache.spec.num_layers))
    for mark, kv in zip(marks, seen, strict=True):
        now = written(mark.layer_stop)
        slots = kv.flatten(2, 3)[:, :, :TOKENS]
        assert not slots.isnan().any()
        assert torch.equal(slots, now.flatten(2, 3)[:, :, :TOKENS])
