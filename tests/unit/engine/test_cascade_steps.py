"""Padded decode steps that read shared keys once have the logits of the model, whichever rows share keys."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from attention.kernels.paged.split import SplitLayer
from attention.prefix_group import GroupCosts
from baton.engine.batch import BatchRow
from baton.engine.device.cascade_steps import cascade_sizes
from baton.engine.device.graphs import DecodeGraphs, GraphSettings, capture_sizes
from baton.engine.device.runner import ModelRunner
from baton.engine.device.shared_prefix import LEAST_ROWS
from baton.engine.request import EngineRequest, int_array
from baton.kvcache.cache import PagedKVCache
from tests.unit.engine.scheduling import Meter
from tests.unit.engine.test_graphs import Reference, load_with
from tests.unit.engine.tiny import BLOCK_SIZE, build, greedy, prompt_of, running
from tests.unit.models.tiny import VOCAB_SIZE, save_tiny

BACKENDS = {"llama": "TRITON_ATTN", "gpt-oss": "TRITON_ATTN", "deepseek-v2": "TRITON_MLA"}
GRAPHS = GraphSettings(max_requests=16, max_context_tokens=48, cascade=True)
# Reading is so dear that every group is worth it.
COSTS = GroupCosts(SplitLayer(num_heads=4, num_kv_heads=2, value_size=16, num_sms=1), key_cost=2.0**30)


def rows_of(lengths: Sequence[int], shared: Sequence[Sequence[int]], *, step: int) -> list[BatchRow]:
    """A step of one decode for each length, in tokens; `shared` has the first blocks of each row."""
    rows = []
    for index, (length, first) in enumerate(zip(lengths, shared, strict=True)):
        own = range(20 + 8 * index, 28 + 8 * index)
        blocks = [*first, *own][: length // BLOCK_SIZE + 1]
        token = int_array([(7 * index + step) % VOCAB_SIZE])
        rows.append(BatchRow(f"request-{index}", token, length, int_array(blocks), None))
    return rows


def with_drafts(row: BatchRow, count: int) -> list[BatchRow]:
    """The row, moved to the start of its last block, and a row for each draft token."""
    start = row.token_start // BLOCK_SIZE * BLOCK_SIZE
    return [row._replace(token_ids=int_array([9 + each]), token_start=start + each) for each in range(count + 1)]


STEMS = {"long": [1, 2, 3, 4, 5], "short": [1, 2], "none": [], "other": [11, 12, 13]}
# The first blocks of each row, step by step. In the third step two requests have left and two others have come.
STEPS = [
    ["long"] * 10,
    ["long", "none", "long", "short", *["long"] * 7],
    ["none", "short", "other", *["long"] * 7, "other", "none"],
    [*["other"] * 9, "long", "long", "none"],
    ["none"] * 12,
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "backend_name"), BACKENDS.items(), ids=BACKENDS)
@torch.inference_mode()
def test_steps_with_a_shared_prefix_have_the_logits_of_the_model(
    family: str, backend_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(family, tmp_path)
    built = build(tmp_path, num_blocks=160)
    reference, cache = Reference(built), PagedKVCache(built.cache.spec, built.cache.shape)
    cache.storage.normal_(generator=torch.Generator().manual_seed(0))
    reference.cache.storage.copy_(cache.storage)
    model, backend = load_with(backend_name, tmp_path, built, max_num_reqs=16)
    assert backend.builder.group_costs() is not None
    monkeypatch.setattr(backend.builder, "group_costs", lambda: COSTS)
    graphs = DecodeGraphs(model, backend, cache, GRAPHS)
    graphs.capture()
    graphs.capture_cascade(None)
    assert graphs.cascade is not None
    slots, draw = graphs.new_slots(), np.random.default_rng(0)
    for step, stems in enumerate(STEPS):
        lengths = [BLOCK_SIZE * len(STEMS[stem]) + int(draw.integers(0, 20)) for stem in stems]
        rows = rows_of(lengths, [STEMS[stem] for stem in stems], step=step)
        if step == 1:  # drafts after a request's token, computed by rows of their own
            rows[2:3] = with_drafts(rows[2], 2)
        size = graphs.size_for(rows)
        assert size is not None
        logits_RV = graphs.launch(rows, size, step=0, slot=slots.take())[: len(rows)]
        torch.testing.assert_close(logits_RV, reference.logits(rows), rtol=1e-4, atol=1e-5)
        assert graphs.shares_keys == (step < 4)
        assert graphs.buffers.sampled[: len(rows)].tolist() == logits_RV.argmax(dim=1).tolist()
    assert graphs.cascade.launched == 4, "all steps but the last"
    torch.testing.assert_close(cache.storage, reference.cache.storage, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("agree", [True, False])
def test_ranks_with_other_gpus_or_heads_read_shared_keys_for_each_row(
    agree: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one rank would replay a graph of another size than the others."""
    save_tiny("llama", tmp_path)
    built = build(tmp_path, num_blocks=160)
    model, backend = load_with("TRITON_ATTN", tmp_path, built, max_num_reqs=16)
    graphs = DecodeGraphs(model, backend, built.cache, GRAPHS)
    assert graphs.cascade is not None
    costs = repr(graphs.cascade.costs)
    theirs = costs if agree else costs.replace("num_sms", "other")
    monkeypatch.setattr(type(model.parallel), "agree", lambda parallel, text, device: text == theirs)
    graphs.capture()
    graphs.capture_cascade(None)
    assert (graphs.cascade is not None) == agree


@pytest.mark.slow
async def test_requests_with_a_common_prompt_get_their_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks of one prompt through the whole engine; some end before others."""
    save_tiny("llama", tmp_path)
    built = build(tmp_path, num_blocks=160)
    model, backend = load_with("TRITON_ATTN", tmp_path, built, max_num_reqs=16)
    monkeypatch.setattr(backend.builder, "group_costs", lambda: COSTS)
    runner = ModelRunner(model, backend, built.cache, built.runner.facts, graphs=GRAPHS, grammars=built.grammars)
    common = prompt_of(14)
    prompts = {f"fork-{index}": (*common, *prompt_of(1 + index % 3, seed=index + 1)) for index in range(9)}
    outputs = []
    for each in (built._replace(runner=runner), built):
        meter = Meter(None)
        async with running(each, meter=meter) as (engine, events):
            engine.submit(EngineRequest("first", common, greedy(1)))
            await events.finished("first")
            for place, (name, prompt) in enumerate(prompts.items()):
                engine.submit(EngineRequest(name, prompt, greedy(3 + place % 2)))
            await events.finished(*prompts)
            assert all(events.started[name].cached_tokens >= 2 * BLOCK_SIZE for name in prompts)
            outputs.append({name: events.ids(name) for name in prompts})
        if each.runner is runner:
            decodes = [work for work, _ in meter.observed if not work.prompt_tokens]
            assert all(work.decode_rows < LEAST_ROWS for work in decodes), "others read shared keys once"
    assert outputs[0] == outputs[1]
    assert runner._graphs is not None
    assert runner._graphs.cascade is not None
    assert runner._graphs.cascade.launched > 0


def test_every_other_size_is_captured_with_a_shared_prefix_and_the_largest_is() -> None:
    assert cascade_sizes([1, 2, 4, 8, 16, 24, 32]) == [16, 32]
    for largest in (4, 8, 64, 200, 256):
        sizes = cascade_sizes(capture_sizes(largest))
        assert all(size >= LEAST_ROWS for size in sizes)
        assert sizes[-1:] == ([largest] if largest >= LEAST_ROWS else [])
