"""Captured decode steps that read shared keys once have the logits of the model, for every group and every size."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from attention.kernels.paged.split import SplitLayer
from attention.prefix_group import GroupCosts
from baton.engine.batch import Batch, BatchRow
from baton.engine.build import BuiltRunner
from baton.engine.device.capture import Recorder
from baton.engine.device.cascade_steps import cascade_sizes
from baton.engine.device.graphs import DecodeGraphs, GraphSettings
from baton.engine.device.shared_prefix import LEAST_ROWS
from baton.engine.request import int_array
from baton.engine.sampling.row import GREEDY_ROW
from baton.kvcache.cache import PagedKVCache
from baton.settings.config import DEMO_MODELS
from tests.conformance.attention.oracle import relative_error
from tests.gpu.demo import build_demo, generate
from tests.gpu.test_graphs import expected_logits
from tests.gpu.waiting import no_waiting
from tests.unit.engine.driver import runner_of
from tests.unit.engine.tiny import greedy

pytestmark = pytest.mark.gpu

BLOCK_SIZE = 16
OWN_BLOCKS = 20
MODELS = ("llama", "deepseek")
GRAPHS = GraphSettings(max_requests=64, max_context_tokens=2048, cascade=True)
ERROR = {"float32": 1e-3, "bfloat16": 0.02}
# Reading is so dear that every group is worth it.
DEAR = GroupCosts(SplitLayer(num_heads=4, num_kv_heads=2, value_size=64, num_sms=1), key_cost=2.0**30)
# The first blocks of a row: long enough for two splits, short, none.
STEMS = [range(100), range(100, 104), range(0)]


def demo(model: str, dtype: str, monkeypatch: pytest.MonkeyPatch, **options: object) -> BuiltRunner:
    built = build_demo(DEMO_MODELS / model, dtype=dtype, block_size=BLOCK_SIZE, cuda_graphs=False, **options)
    assert built.runner.backend.builder.group_costs() is not None
    monkeypatch.setattr(built.runner.backend.builder, "group_costs", lambda: DEAR)
    return built


def rows_of(stems: Sequence[int], *, step: int) -> list[BatchRow]:
    rows = []
    for place, stem in enumerate(stems):
        first = 104 + OWN_BLOCKS * place
        blocks = [*STEMS[stem], *range(first, first + OWN_BLOCKS)]
        length = BLOCK_SIZE * len(STEMS[stem]) + (37 * place + 11 * step) % (BLOCK_SIZE * OWN_BLOCKS - 1)
        table = int_array(blocks[: length // BLOCK_SIZE + 1])
        rows.append(BatchRow(f"{place}-{stem}", int_array([100 + place]), length, table, GREEDY_ROW))
    return rows


# In bfloat16 the experts of a token near a tie would depend on the order of sums.
@pytest.mark.parametrize(("model", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("deepseek", "float32")])
def test_replays_with_a_shared_prefix_have_the_logits_of_the_model(
    model: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = demo(model, dtype, monkeypatch)
    shape = replace(built.cache.shape, num_blocks=104 + 64 * OWN_BLOCKS)
    cache = PagedKVCache(built.cache.spec, shape, built.cache.view.device)
    cache.storage.normal_()
    before = cache.storage.clone()
    graphs = DecodeGraphs(built.runner.model, built.runner.backend, cache, GRAPHS)
    recorder = Recorder(cache.view.device)
    with torch.inference_mode():
        graphs.capture(recorder=recorder)
        graphs.capture_cascade(recorder)
    assert torch.equal(cache.storage, before)
    assert graphs.cascade is not None
    slots, sizes = graphs.new_slots(), cascade_sizes(graphs.sizes)
    assert sizes[-1] == 64
    for step, size in enumerate(sizes):
        for stems in ([0] * size, [0, 1, 2] * (size // 3), [2, *[1] * (size - 1)], [*[2] * 3, *[0] * (size - 3)]):
            rows, launched = rows_of(stems, step=step), graphs.cascade.launched
            full = graphs.size_for(rows)
            assert full is not None
            with torch.inference_mode():
                logits_RV = graphs.launch(rows, full, step=0, slot=slots.take())[: len(rows)].clone()
            assert graphs.cascade.launched == launched + (max(map(stems.count, (0, 1))) >= LEAST_ROWS)
            assert graphs.buffers.sampled[: len(rows)].tolist() == logits_RV.argmax(dim=1).tolist()
            cache.storage.copy_(before)
            with torch.inference_mode():
                theirs = expected_logits(built, cache, rows)
            assert relative_error(logits_RV.cpu(), theirs.cpu()) < ERROR[dtype], (size, stems)
            cache.storage.copy_(before)


@pytest.mark.parametrize("model", MODELS)
def test_requests_with_a_common_prompt_get_the_tokens_of_steps_without_cascade(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = demo(model, "float32", monkeypatch, num_blocks=1024, max_batch_tokens=512)
    generator = torch.Generator().manual_seed(0)
    common = torch.randint(3, 4000, (700,), generator=generator).tolist()
    prompts = [[*common, *torch.randint(3, 4000, (5 + index,), generator=generator).tolist()] for index in range(20)]
    # The first prompt's blocks are in the prefix cache before the others come.
    outputs = []
    for cascade in (True, False):
        runner = runner_of(built, graphs=replace(GRAPHS, cascade=cascade))
        ours = built._replace(runner=runner)
        runner.prepare()
        outputs.append([each.token_ids for each in generate(ours, prompts, greedy(24))])
        if cascade:
            graphs = runner._graphs
            assert graphs is not None
            assert graphs.cascade is not None
            assert graphs.cascade.launched > 5
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("model", MODELS)
def test_launching_ahead_changes_no_token_and_waits_for_nothing(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group of a step is written while the step before it runs. The first steps allocate memory."""
    built = demo(model, "float32", monkeypatch, num_blocks=1500)
    drawn = []
    for ahead in (1, 2):
        runner = runner_of(built, graphs=GRAPHS)
        for part in runner._cache.blockwise:
            part.storage.normal_(generator=torch.Generator(part.storage.device).manual_seed(0))
        before = [part.storage.clone() for part in runner._cache.blockwise]
        runner.prepare()
        for part, was in zip(runner._cache.blockwise, before, strict=True):
            part.storage.copy_(was)
        in_flight, tokens = [], []
        for step in range(12):
            stems = [step % 2, *[0] * 10, *[1] * 12][: 15 + step % 8]
            with no_waiting() if step > 3 else nullcontext():
                in_flight.append(runner.launch(Batch(step, tuple(rows_of(stems, step=step)))))
            if len(in_flight) == ahead:
                tokens.append([getattr(each, "token_id", None) for each in in_flight.pop(0).wait()])
        tokens += [[getattr(each, "token_id", None) for each in step.wait()] for step in in_flight]
        drawn.append(tokens)
    assert drawn[0] == drawn[1]
