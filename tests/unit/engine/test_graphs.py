"""Decodes in the buffers of the graphs: a padded step equals the model's own step, and the buffers hold the rows of the
last step only. Which sizes are captured, and how many of them memory allows."""

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.backend import AttentionBackend
from attention.metadata import build_common_metadata
from attention.platform import probe_platform
from attention.selection import BACKENDS
from baton.core.errors import InternalError
from baton.core.sampling import ResolvedSampling
from baton.engine.batch import BatchRow
from baton.engine.build import BuiltRunner
from baton.engine.device.capture import FreeMemory, affordable, fitting, taken_bytes, thin
from baton.engine.device.decode_buffers import DecodeBuffers, new_decode_buffers
from baton.engine.device.graphs import DecodeGraphs, GraphSettings, capture_sizes, decode_step
from baton.engine.device.host_rows import HostRows
from baton.engine.device.step_slot import StepSlot
from baton.engine.request import int_array
from baton.engine.sampling.row import SampleRow
from baton.kvcache.cache import PagedKVCache
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.step_context import StepContext
from baton.models.loading.loader import load_model
from baton.models.loading.needs import attention_needs
from tests.unit.engine.tiny import BLOCK_SIZE, build
from tests.unit.models.tiny import VOCAB_SIZE, save_tiny

CPU = torch.device("cpu")
SETTINGS = GraphSettings(max_requests=8, max_context_tokens=48)
FAMILIES = [
    "llama",
    "deepseek-v2",
    "deepseek-v3",
    "deepseek-v32",
    "glm-moe-dsa-shared-selection",
    "mistral-window",
    "gpt-oss",
    "llama4",
    "gemma3",
    "gemma3n",
    "gemma4-experts",
    "bloom",
]


def row(token: int, start: int, blocks: list[int], *, source: int | None = None) -> BatchRow:
    return BatchRow("", int_array([token]), start, int_array(blocks), None, source)


def buffers_of(max_rows: int = 5, max_context_tokens: int = 40) -> DecodeBuffers:
    return new_decode_buffers(
        max_rows=max_rows, max_context_tokens=max_context_tokens, block_size=BLOCK_SIZE, device=CPU
    )


def slot_of(buffers: DecodeBuffers) -> StepSlot:
    return StepSlot(CPU, input_bytes=len(buffers.host.memory), max_rows=buffers.max_rows)


def run(buffers: DecodeBuffers, rows: list[BatchRow]) -> None:
    """Fills the buffers as a step does, without a model."""
    buffers.fill(rows, step=0, slot=slot_of(buffers))
    buffers.place_new_blocks()
    buffers.host.copied()


def steps_of_coming_and_going_requests(num_steps: int) -> Iterator[list[BatchRow]]:
    """Decodes of one to five requests, which begin at different steps, pause, and have their blocks scattered."""
    draw = np.random.default_rng(0)
    blocks = draw.permutation(60).reshape(5, 12).tolist()
    lengths = [0] * 5
    for step in range(num_steps):
        live = [request for request in range(5) if (step >= 2 * request and (step + request) % 7) or request == 0]
        yield [
            row(int(draw.integers(VOCAB_SIZE)), lengths[each], blocks[each][: lengths[each] // BLOCK_SIZE + 1])
            for each in live
        ]
        for each in live:
            lengths[each] += 1


class Reference:
    """Runs the same requests on the model alone, in steps without padding."""

    def __init__(self, built: BuiltRunner) -> None:
        self._model, self._backend = built.runner.model, built.runner.backend
        self.cache = empty_cache(built)

    @torch.inference_mode()
    def logits(self, rows: list[BatchRow]) -> Tensor:
        common, positions = build_common_metadata(
            query_lens=[1] * len(rows),
            context_lens=[each.token_start for each in rows],
            block_tables=[each.block_ids for each in rows],
            block_size=BLOCK_SIZE,
        )
        token_ids = torch.tensor([each.token_ids[0] for each in rows])
        hidden = self._model.compute(
            token_ids, positions, self.cache, StepContext(self._backend.builder.build(0, common))
        )
        return self._model.compute_logits(hidden)


def empty_cache(built: BuiltRunner) -> PagedKVCache:
    """A cache full of NaN, so that reading an unwritten slot shows."""
    cache = PagedKVCache(built.cache.spec, built.cache.shape)
    cache.storage.fill_(torch.nan)
    return cache


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_decodes_have_the_logits_of_the_model(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    built = build(tmp_path)
    reference, cache = Reference(built), empty_cache(built)
    graphs = DecodeGraphs(built.runner.model, built.runner.backend, cache, SETTINGS)
    graphs.capture()
    slots = graphs.new_slots()
    for rows in steps_of_coming_and_going_requests(20):
        size = graphs.size_for(rows)
        assert size is not None
        with torch.inference_mode():
            logits_RV = graphs.launch(rows, size, step=0, slot=slots.take())[: len(rows)]
        torch.testing.assert_close(logits_RV, reference.logits(rows), rtol=1e-4, atol=1e-5)
        assert graphs.buffers.sampled[: len(rows)].tolist() == logits_RV.argmax(dim=1).tolist()
    torch.testing.assert_close(cache.storage, reference.cache.storage, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"),
    [("mistral-window", "TRITON_ATTN"), ("deepseek-v2", "TRITON_MLA"), ("deepseek-v32", "TRITON_MLA")],
)
def test_a_captured_step_depends_on_no_value_of_the_host(family: str, name: str, tmp_path: Path) -> None:
    """A replay repeats the work that the captured step queued, with the host's numbers of the capture. Everything that
    changes is in the buffers."""
    save_tiny(family, tmp_path)
    built = build(tmp_path)
    reference, cache = Reference(built), empty_cache(built)
    model, backend = load_with(name, tmp_path, built)
    buffers = buffers_of(max_rows=8, max_context_tokens=SETTINGS.max_context_tokens)
    slot = slot_of(buffers)
    buffers.fill([row(1, SETTINGS.max_context_tokens - 1, [0] * 12)] * 8, step=0, slot=slot)
    buffers.slot_mapping.fill_(-1)
    common = buffers.common(3)
    common.seq_lens_cpu = common.seq_lens_cpu.clone()
    common.num_computed_tokens_cpu = common.num_computed_tokens_cpu.clone()
    assert backend.builder.plans_on_device
    assert backend.builder.can_run_in_cudagraph(common)

    def captured() -> Tensor:
        with torch.inference_mode():
            buffers.place_new_blocks()
            return decode_step(model, cache, buffers, backend.builder.build_for_cudagraph_capture(common), 3)

    cache.storage.zero_()
    captured()
    assert not cache.storage.any()
    cache.storage.fill_(torch.nan)
    for rows in steps_of_coming_and_going_requests(4):
        buffers.fill(rows, step=0, slot=slot)
        logits_RV = captured()[: len(rows)]
        buffers.host.copied()
        torch.testing.assert_close(logits_RV, reference.logits(rows), rtol=1e-4, atol=1e-5)


def load_with(
    name: str, directory: Path, built: BuiltRunner, *, max_num_reqs: int = 8, batch_invariant: bool = False
) -> tuple[CausalLM, AttentionBackend]:
    """The model with a backend of Triton kernels, which run in the interpreter without a GPU."""
    needs = attention_needs(
        built.config,
        dtype="float32",
        device="cpu",
        shape=built.cache.shape,
        max_num_reqs=max_num_reqs,
        batch_invariant=batch_invariant,
    )
    (backend_class,) = (each for each in BACKENDS if each.capabilities.name == name)
    backend = backend_class(needs, probe_platform("cpu"), context_workspace_tokens=64)
    return load_model(directory, built.config, backend=backend, dtype="float32", device="cpu"), backend


def test_buffers_hold_the_rows_and_padding_after_them() -> None:
    buffers = buffers_of()
    run(buffers, [row(7, 9, [5, 4, 3]), row(0, 0, [8], source=1), row(6, 3, [2])])
    run(buffers, [row(7, 10, [5, 4, 3]), row(0, 4, [8, 1], source=0)])
    assert buffers.positions[:3].tolist() == [10, 4, 0]
    assert buffers.seq_lens[:3].tolist() == [11, 5, 0]
    assert buffers.slot_mapping[:3].tolist() == [3 * BLOCK_SIZE + 2, 1 * BLOCK_SIZE, -1]
    assert buffers.token_source[:3].tolist() == [buffers.max_rows, 0, 0]
    assert buffers.tokens[buffers.max_rows :][:3].tolist() == [7, 0, 0]
    assert buffers.block_table[0, :3].tolist() == [5, 4, 3]
    assert buffers.block_table[1, :2].tolist() == [8, 1]
    assert not buffers.seq_lens[2:].any()
    assert (buffers.slot_mapping[2:] == -1).all()


def test_sampled_tokens_stay_when_rows_are_filled_in() -> None:
    buffers = buffers_of()
    buffers.sampled[:5] = torch.arange(10, 15, dtype=torch.int32)
    run(buffers, [row(7, 0, [1]), row(0, 0, [2], source=4)])
    assert buffers.sampled[:5].tolist() == [10, 11, 12, 13, 14]
    assert buffers.tokens[buffers.token_source[:2]].tolist() == [7, 14]


def test_the_metadata_of_a_size_follow_the_buffers() -> None:
    buffers = buffers_of()
    common = buffers.common(4)
    run(buffers, [row(7, 9, [5, 4, 3]), row(6, 3, [2])])
    assert common.seq_lens.tolist() == common.seq_lens_cpu.tolist() == [10, 4, 0, 0]
    assert common.num_computed_tokens_cpu.tolist() == [9, 3, 0, 0]
    assert common.slot_mapping.tolist() == [3 * BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 3, -1, -1]
    assert common.query_start_loc.tolist() == common.query_start_loc_cpu.tolist() == [0, 1, 2, 3, 4]
    assert (common.num_reqs, common.num_actual_tokens, common.max_query_len) == (4, 4, 1)
    run(buffers, [row(1, 0, [9])])
    assert common.seq_lens.tolist() == common.seq_lens_cpu.tolist() == [1, 0, 0, 0]
    assert common.num_computed_tokens_cpu.tolist() == [0, 0, 0, 0]


def test_a_request_gets_its_blocks_whichever_request_had_the_row_before() -> None:
    buffers = buffers_of()
    first, second = row(1, 8, [5, 4, 3]), row(1, 8, [9, 8, 7])
    for rows in ([first, second], [second, first], [second], [first, second], [second, second]):
        run(buffers, rows)
        for place, each in enumerate(rows):
            assert buffers.block_table[place, :3].tolist() == list(each.block_ids)


@pytest.mark.parametrize(
    ("rows", "says"), [([row(1, 0, [0])] * 65, "65 rows"), ([row(1, 0, list(range(11)))], "11 blocks")]
)
def test_rows_that_do_not_fit_are_refused(rows: list[BatchRow], says: str) -> None:
    with pytest.raises(InternalError, match=says):
        run(buffers_of(), rows)


@pytest.mark.parametrize("largest", [1, 2, 3, 5, 64, 100, 200, 256, 512, 1024])
def test_captured_sizes_reach_the_largest_and_pad_little(largest: int) -> None:
    sizes = capture_sizes(largest)
    assert sizes[0] == 1
    assert sizes[-1] == largest
    assert sizes == sorted(set(sizes))
    assert all(after < 1.5 * (before + 1) for before, after in pairwise(sizes) if before >= 16)


def test_sizes_that_are_left_out_are_spread_and_the_smallest_stays() -> None:
    assert thin([1, 2, 4, 8, 16, 24], 6) == [1, 2, 4, 8, 16, 24]
    assert thin([1, 2, 4, 8, 16, 24], 3) == [1, 4, 16]
    assert thin([1, 2, 4, 8, 16, 24], 1) == [1]
    assert thin([1, 2, 4], 0) == []


def test_graphs_are_captured_for_as_long_as_memory_allows() -> None:
    assert affordable([1 << 30], None) == sys.maxsize
    assert affordable([500], 500) == 0
    assert affordable([400], 500) > 100
    assert affordable([300, 90], 500, first=1) > 100, "the first graph of a kind says nothing"
    assert affordable([300, 90, 10], 500, first=1) == 10
    assert affordable([300, 90, 110], 500, first=1) == 0
    assert affordable([400, 30, 20], 500) == 1
    assert affordable([400, 0, 0], 500) == 100


@pytest.mark.parametrize(
    ("room", "kept"),
    [
        (None, [64, 512, 1024, 2048, 4096]),
        (820, [64, 512, 1024, 2048, 4096]),
        (810, [64, 512, 1024, 2048]),
        (210, [64, 512, 1024]),
        (110, [64, 512]),
        (0, [64, 512]),  # small steps take little, whatever the room
    ],
)
def test_a_step_that_would_take_the_memory_of_smaller_ones_is_not_captured(room: int | None, kept: list[int]) -> None:
    assert fitting([64, 512, 1024, 2048, 4096], lambda size: size // 10, room, least=512) == kept


def test_a_size_that_is_much_larger_than_the_others_leaves_them() -> None:
    assert fitting([16, 4096], lambda size: size, 100, least=512) == [16]
    assert fitting([4096], lambda size: size, 100, least=512) == [4096]  # nothing else could be captured
    assert fitting([], lambda size: size, 100, least=512) == []


def test_memory_taken_by_another_process_does_not_count_for_a_capture() -> None:
    mib, gib = 1 << 20, 1 << 30
    before = FreeMemory(60 * gib, 20 * gib)
    alone = taken_bytes(before, FreeMemory(before.free - 104 * mib, before.reserved + 100 * mib))
    assert alone == 104 * mib
    crowded = taken_bytes(before, FreeMemory(before.free - 40 * gib, before.reserved + 100 * mib))
    assert alone < crowded < 150 * mib
    assert taken_bytes(before, FreeMemory(before.free + gib, before.reserved)) == 0
    # The bound for all sizes is small enough that a process that loads meanwhile costs no graph.
    assert len(capture_sizes(256)) * taken_bytes(before, FreeMemory(0, before.reserved)) < 700 * mib


def new_blocks(host: HostRows, buffers: DecodeBuffers) -> dict[tuple[int, int], int]:
    """The blocks that the step brings, by row and column."""
    nowhere, width = buffers.block_table.numel(), buffers.block_table.shape[1]
    listed = zip(host.fields["new_block_place"].tolist(), host.fields["new_block"].tolist(), strict=True)
    return {divmod(place, width): block for place, block in listed if place != nowhere}


def test_blocks_count_as_copied_only_when_they_are() -> None:
    """If a step fails in between, the next one copies them."""
    buffers = buffers_of()
    host = buffers.host
    rows = [row(1, 8, [5, 4, 3]), row(1, 0, [9])]
    for _ in range(2):
        assert host.take(rows, step=0) == {}
        assert new_blocks(host, buffers) == {(0, 0): 5, (0, 1): 4, (0, 2): 3, (1, 0): 9}
    host.copied()
    assert host.take(rows, step=0) == {}
    assert new_blocks(host, buffers) == {}


@pytest.mark.parametrize("placed", [True, False], ids=["after its blocks were placed", "before"])
@pytest.mark.parametrize("after", [[1, 2, 5], [1, 2]], ids=["with a block more", "with the blocks of before"])
def test_a_request_in_the_row_of_a_step_that_failed_gets_all_its_blocks(placed: bool, after: list[int]) -> None:
    buffers = buffers_of()
    before = row(0, 2 * BLOCK_SIZE - 1, [1, 2])
    run(buffers, [before])
    buffers.fill([row(0, 3 * BLOCK_SIZE - 1, [7, 8, 9])], step=0, slot=slot_of(buffers))
    if placed:
        buffers.place_new_blocks()
    run(buffers, [before if len(after) == 2 else row(0, 3 * BLOCK_SIZE - 1, after)])
    assert buffers.table[0, : len(after)].tolist() == after


def test_blocks_for_which_a_step_has_no_room_are_copied_by_themselves() -> None:
    num_blocks = 400
    buffers = buffers_of(max_context_tokens=num_blocks * BLOCK_SIZE)
    rows = [row(1, 0, list(range(start, start + num_blocks))) for start in (1, 1000)] + [row(1, 0, [7])]
    assert buffers.host.take(rows, step=0) == {1: rows[1].block_ids}
    run(buffers, rows)
    table = buffers.block_table[:3, :num_blocks]
    assert table[:2].tolist() == [list(each.block_ids) for each in rows[:2]]
    assert table[2, 0] == 7


def test_a_row_draws_as_its_own_request_asks() -> None:
    buffers, draw = buffers_of(), ResolvedSampling(temperature=0.5, top_k=7, seed=3)
    sampled = row(1, 0, [1])._replace(sample=SampleRow(draw, 4, (), int_array(), 0))
    run(buffers, [sampled, row(2, 0, [2])])
    assert buffers.sampling.temperature_R[:3].tolist() == [0.5, 0, 0]
    assert (int(buffers.sampling.top_k_R[0]), int(buffers.sampling.seed_R[0])) == (7, 3)
    run(buffers, [row(2, 1, [2]), sampled._replace(sample=SampleRow(draw, 5, (), int_array(), 0))])
    assert buffers.sampling.temperature_R[:3].tolist() == [0, 0.5, 0]
    assert (int(buffers.sampling.top_k_R[1]), int(buffers.sampling.output_index_R[1])) == (7, 5)
    run(buffers, [row(2, 2, [2])])
    assert not buffers.sampling.temperature_R.any()


def test_a_row_that_grows_by_a_block_gets_it_with_the_step() -> None:
    buffers = buffers_of()
    other = row(1, 4, [7, 8])
    run(buffers, [row(1, 4, [5, 4]), other])
    longer = [row(1, 8, [5, 4, 3]), other._replace(token_start=5)]
    assert buffers.host.take(longer, step=0) == {}
    assert new_blocks(buffers.host, buffers) == {(0, 2): 3}
    run(buffers, longer)
    assert buffers.block_table[:2, :3].tolist() == [[5, 4, 3], [7, 8, 0]]
    run(buffers, [longer[0]._replace(token_start=9), row(1, 8, [7, 8, 9])])
    assert new_blocks(buffers.host, buffers) == {(1, 2): 9}
    assert buffers.block_table[:2, :3].tolist() == [[5, 4, 3], [7, 8, 9]]


def test_a_row_that_was_padding_when_its_block_came_gets_it_later() -> None:
    """A step of fewer rows does not write the table rows after them."""
    buffers = buffers_of()
    first, second = row(1, 0, [1]), row(1, 4, [7, 8])
    run(buffers, [first, second])
    longer = row(1, 8, [7, 8, 9])
    buffers.host.take([first, longer], step=0)
    run(buffers, [first])
    assert buffers.block_table[1, 2] == 0
    run(buffers, [first, longer])
    assert buffers.block_table[1, :3].tolist() == [7, 8, 9]
