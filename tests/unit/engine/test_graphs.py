"""Decodes in the buffers of the graphs: a padded step equals the model's own, and the buffers hold what their last
step was given and no more. Which sizes are captured, and what of them memory allows."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from attention.backend import AttentionBackend
from attention.cache import PagedKVCache
from attention.metadata import build_common_metadata
from attention.platform import probe_platform
from attention.selection import BACKENDS
from baton.errors import InternalError
from baton.types import SamplingParams
from engine.batch import BatchRow, SampleRow
from engine.build import Built
from engine.decode_buffers import DecodeBuffers, new_decode_buffers
from engine.graphs import (
    DecodeGraphs,
    FreeMemory,
    GraphSettings,
    affordable,
    capture_sizes,
    decode_step,
    taken_bytes,
    thin,
)
from engine.request import int_array
from models.causal_lm import CausalLM
from models.families import attention_needs
from models.loader import load_model
from tests.unit.engine.tiny import BLOCK_SIZE, build
from tests.unit.models.tiny import VOCAB_SIZE, save_tiny

CPU = torch.device("cpu")
SETTINGS = GraphSettings(max_requests=8, max_context_tokens=48)
FAMILIES = ["llama", "deepseek-v2", "deepseek-v3", "mistral-window", "gpt-oss", "llama4", "gemma3", "bloom"]


def row(token: int, start: int, blocks: list[int], *, source: int | None = None) -> BatchRow:
    return BatchRow("", int_array([token]), start, int_array(blocks), None, source)


def buffers_of(max_rows: int = 5, max_context_tokens: int = 40) -> DecodeBuffers:
    return new_decode_buffers(
        max_rows=max_rows, max_context_tokens=max_context_tokens, block_size=BLOCK_SIZE, device=CPU
    )


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
    """The same requests by the model alone, in steps without padding."""

    def __init__(self, built: Built) -> None:
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
        hidden = self._model(token_ids, positions, self.cache, self._backend.builder.build(0, common))
        return self._model.compute_logits(hidden)


def empty_cache(built: Built) -> PagedKVCache:
    """In which a slot that is read before it is written shows."""
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
    for rows in steps_of_coming_and_going_requests(20):
        size = graphs.size_for(rows)
        assert size is not None
        with torch.inference_mode():
            logits_RV = graphs.launch(rows, size, step=0)[: len(rows)]
        torch.testing.assert_close(logits_RV, reference.logits(rows), rtol=1e-4, atol=1e-5)
        assert graphs.buffers.sampled[: len(rows)].tolist() == logits_RV.argmax(dim=1).tolist()
    torch.testing.assert_close(cache.storage, reference.cache.storage, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), [("mistral-window", "TRITON_ATTN"), ("deepseek-v2", "TRITON_MLA")])
def test_a_step_with_the_metadata_of_its_capture_follows_the_buffers(family: str, name: str, tmp_path: Path) -> None:
    """As a replayed graph does: what it reads is what the builder has refilled in place."""
    save_tiny(family, tmp_path)
    built = build(tmp_path)
    reference, cache = Reference(built), empty_cache(built)
    model, backend = load_with(name, tmp_path, built)
    buffers = buffers_of(max_rows=8, max_context_tokens=SETTINGS.max_context_tokens)
    buffers.fill([row(1, SETTINGS.max_context_tokens - 1, [0] * 12)] * 8, step=0)
    buffers.slot_mapping.fill_(-1)
    common = buffers.common(3)
    captured = backend.builder.build_for_cudagraph_capture(common)
    assert backend.builder.can_run_in_cudagraph(common)
    cache.storage.zero_()
    with torch.inference_mode():
        decode_step(model, cache, buffers, captured, 3)
    assert not cache.storage.any()
    cache.storage.fill_(torch.nan)
    for rows in steps_of_coming_and_going_requests(4):
        buffers.fill(rows, step=0)
        refilled = backend.builder.build(0, common)
        # On a CPU writing is torch's, which works its places out once.
        replayed = replace(captured, new_tokens=refilled.new_tokens)
        with torch.inference_mode():
            logits_RV = decode_step(model, cache, buffers, replayed, 3)[: len(rows)]
        torch.testing.assert_close(logits_RV, reference.logits(rows), rtol=1e-4, atol=1e-5)


def load_with(name: str, directory: Path, built: Built) -> tuple[CausalLM, AttentionBackend]:
    """The model with a backend of Triton kernels, which without a GPU run in the interpreter."""
    needs = attention_needs(built.config, dtype="float32", device="cpu", shape=built.cache.shape, max_num_reqs=8)
    (backend_class,) = (each for each in BACKENDS if each.capabilities.name == name)
    backend = backend_class(needs, probe_platform("cpu"), context_workspace_tokens=64)
    return load_model(directory, built.config, backend=backend, dtype="float32", device="cpu"), backend


def test_buffers_hold_the_rows_and_padding_behind_them() -> None:
    buffers = buffers_of()
    buffers.fill([row(7, 9, [5, 4, 3]), row(0, 0, [8], source=1), row(6, 3, [2])], step=0)
    buffers.fill([row(7, 10, [5, 4, 3]), row(0, 4, [8, 1], source=0)], step=0)
    assert buffers.positions[:3].tolist() == [10, 4, 0]
    assert buffers.seq_lens[:3].tolist() == [11, 5, 0]
    assert buffers.slot_mapping[:3].tolist() == [3 * BLOCK_SIZE + 2, 1 * BLOCK_SIZE, -1]
    assert buffers.token_source[:3].tolist() == [buffers.max_rows, 0, 0]
    assert buffers.tokens[buffers.max_rows :][:3].tolist() == [7, 0, 0]
    assert buffers.block_table[0, :3].tolist() == [5, 4, 3]
    assert buffers.block_table[1, :2].tolist() == [8, 1]
    assert not buffers.seq_lens[2:].any()
    assert (buffers.slot_mapping[2:] == -1).all()


def test_what_was_sampled_stays_when_rows_are_filled_in() -> None:
    buffers = buffers_of()
    buffers.sampled[:5] = torch.arange(10, 15, dtype=torch.int32)
    buffers.fill([row(7, 0, [1]), row(0, 0, [2], source=4)], step=0)
    assert buffers.sampled[:5].tolist() == [10, 11, 12, 13, 14]
    assert buffers.tokens[buffers.token_source[:2]].tolist() == [7, 14]


def test_the_metadata_of_a_size_follow_the_buffers() -> None:
    buffers = buffers_of()
    common = buffers.common(4)
    buffers.fill([row(7, 9, [5, 4, 3]), row(6, 3, [2])], step=0)
    assert common.seq_lens.tolist() == common.seq_lens_cpu.tolist() == [10, 4, 0, 0]
    assert common.num_computed_tokens_cpu.tolist() == [9, 3, 0, 0]
    assert common.slot_mapping.tolist() == [3 * BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 3, -1, -1]
    assert common.query_start_loc.tolist() == common.query_start_loc_cpu.tolist() == [0, 1, 2, 3, 4]
    assert (common.num_reqs, common.num_actual_tokens, common.max_query_len) == (4, 4, 1)
    buffers.fill([row(1, 0, [9])], step=0)
    assert common.seq_lens.tolist() == common.seq_lens_cpu.tolist() == [1, 0, 0, 0]
    assert common.num_computed_tokens_cpu.tolist() == [0, 0, 0, 0]


def test_a_request_gets_its_blocks_whoever_had_the_row_before() -> None:
    buffers = buffers_of()
    first, second = row(1, 8, [5, 4, 3]), row(1, 8, [9, 8, 7])
    for rows in ([first, second], [second, first], [second], [first, second], [second, second]):
        buffers.fill(rows, step=0)
        for place, each in enumerate(rows):
            assert buffers.block_table[place, :3].tolist() == list(each.block_ids)


@pytest.mark.parametrize(
    ("rows", "says"), [([row(1, 0, [0])] * 65, "65 rows"), ([row(1, 0, list(range(11)))], "11 blocks")]
)
def test_rows_that_do_not_fit_are_refused(rows: list[BatchRow], says: str) -> None:
    with pytest.raises(InternalError, match=says):
        buffers_of().fill(rows, step=0)


@pytest.mark.parametrize("largest", [1, 2, 3, 5, 64, 100, 200, 256])
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
    assert affordable([400, 30, 20], 500) == 1
    assert affordable([400, 0, 0], 500) == 100


def test_a_capture_does_not_pay_for_what_another_process_takes_meanwhile() -> None:
    mib, gib = 1 << 20, 1 << 30
    before = FreeMemory(60 * gib, 20 * gib)
    alone = taken_bytes(before, FreeMemory(before.free - 104 * mib, before.reserved + 100 * mib))
    assert alone == 104 * mib
    crowded = taken_bytes(before, FreeMemory(before.free - 40 * gib, before.reserved + 100 * mib))
    assert alone < crowded < 150 * mib
    assert taken_bytes(before, FreeMemory(before.free + gib, before.reserved)) == 0
    # Of all sizes, so that a neighbour that loads for as long as this node captures costs none of them.
    assert len(capture_sizes(256)) * taken_bytes(before, FreeMemory(0, before.reserved)) < 700 * mib


def test_blocks_count_as_copied_only_when_they_are() -> None:
    """A step that fails between leaves the next one to copy them."""
    host = buffers_of().host
    rows = [row(1, 8, [5, 4, 3]), row(1, 0, [9])]
    assert host.take(rows, step=0) == host.take(rows, step=0) == {0: rows[0].block_ids, 1: rows[1].block_ids}
    host.copied({0: rows[0].block_ids})
    assert host.take(rows, step=0) == {1: rows[1].block_ids}


def test_a_row_draws_as_its_own_request_asks() -> None:
    buffers, draw = buffers_of(), SamplingParams(temperature=0.5, top_k=7, seed=3)
    sampled = row(1, 0, [1])._replace(sample=SampleRow(draw, 4, (), int_array(), 0))
    buffers.fill([sampled, row(2, 0, [2])], step=0)
    assert buffers.sampling.temperature_R[:3].tolist() == [0.5, 0, 0]
    assert (int(buffers.sampling.top_k_R[0]), int(buffers.sampling.seed_R[0])) == (7, 3)
    buffers.fill([row(2, 1, [2]), sampled._replace(sample=SampleRow(draw, 5, (), int_array(), 0))], step=0)
    assert buffers.sampling.temperature_R[:3].tolist() == [0, 0.5, 0]
    assert (int(buffers.sampling.top_k_R[1]), int(buffers.sampling.output_index_R[1])) == (7, 5)
    buffers.fill([row(2, 2, [2])], step=0)
    assert not buffers.sampling.temperature_R.any()
