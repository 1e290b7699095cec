"""Keys that are split among programs: attention equals its definition, and a GPU that has room gets more splits."""

from dataclasses import replace

import pytest
import torch

from attention.backends.triton_metadata import TritonAttentionBuilder
from attention.kernels.paged.split import LEAST_KEYS, SplitLayer, choose_splits
from attention.metadata import PaddedBatch
from attention.platform import Platform
from tests.conformance.attention.settings import SETTINGS
from tests.device import DEVICE
from tests.unit.attention.paged_batches import needs_of, paged_batch, relative_error, triton_backend
from tests.unit.attention.ragged_batch import FEATURES, ragged_batch
from tests.unit.attention.test_unified_kernel import attend

LONG = 2 * LEAST_KEYS + 71
H200_8B = SplitLayer(num_heads=32, num_kv_heads=8, value_size=128, num_sms=132)


@pytest.mark.parametrize("name", ["none", "not causal", "window of 70, not causal", "soft cap", "ALiBi", "sinks"])
def test_split_keys_equal_the_definition(name: str) -> None:
    # The last split of the long request begins inside of its queries, and the short ones have one split or no keys.
    batch = ragged_batch([90, 3, 5, 0], [LONG, 40, 5, 0], dtype=torch.float16)
    attend(batch, FEATURES[name], splits=3)
    batch.check(FEATURES[name])


@pytest.mark.parametrize("splits", [2, 9])
def test_any_number_of_splits_equals_the_definition(splits: int) -> None:
    batch = ragged_batch([7, 1], [LONG, LEAST_KEYS], num_heads=2, num_kv_heads=1, dtype=torch.bfloat16)
    attend(batch, FEATURES["none"], splits=splits)
    batch.check(FEATURES["none"])


def test_a_query_that_no_key_follows_gets_zeros() -> None:
    batch = ragged_batch([4, 6], [0, LEAST_KEYS + 9], dtype=torch.float16)
    attend(batch, FEATURES["none"], splits=2)
    batch.check(FEATURES["none"])


def chosen(num_tokens: int, num_keys: int, *, decodes: int = 0) -> int:
    batch_tokens = num_tokens + decodes
    return choose_splits(H200_8B, num_tokens=num_tokens, num_reqs=1, batch_tokens=batch_tokens, num_keys=num_keys)


@pytest.mark.parametrize("num_keys", [8192, 32768, 131072])
def test_a_short_chunk_over_a_long_context_is_split_as_far_as_the_gpu_has_room(num_keys: int) -> None:
    splits = chosen(16, num_keys)
    assert splits == min(132 // 8, num_keys // LEAST_KEYS)
    assert chosen(64, num_keys) == min(132 // 16, num_keys // LEAST_KEYS)


@pytest.mark.parametrize("num_keys", [64, 1024, 2047])
def test_a_short_context_is_not_split(num_keys: int) -> None:
    assert chosen(16, num_keys) == 1


@pytest.mark.parametrize(("num_tokens", "splits"), [(190, 5), (300, 3), (640, 4)])
def test_tiles_that_leave_part_of_the_gpu_idle_are_split_so_that_less_of_it_is(num_tokens: int, splits: int) -> None:
    # For example, 80 tiles over all heads would take as long as 132 do, and 160 as long as 264.
    assert chosen(num_tokens, 32768) == splits


@pytest.mark.parametrize("num_tokens", [512, 2048, 8192])
def test_many_rows_are_not_split(num_tokens: int) -> None:
    assert chosen(num_tokens, 131072) == 1


def test_partial_results_of_many_decodes_do_not_fill_the_memory() -> None:
    assert chosen(16, 131072, decodes=8192) == 1


def test_a_captured_step_with_room_for_many_prompts_has_few_programs_that_end_at_once() -> None:
    splits = choose_splits(H200_8B, num_tokens=16, num_reqs=40, batch_tokens=16, num_keys=131072)
    assert 1 < splits < chosen(16, 131072)
    assert splits * 8 * (1 + 40) <= 8 * 132


def test_a_layer_with_many_kv_heads_is_split_less() -> None:
    layer = H200_8B._replace(num_kv_heads=32)
    assert choose_splits(layer, num_tokens=16, num_reqs=1, batch_tokens=16, num_keys=131072) == 132 // 32
    many = layer._replace(num_heads=128, num_kv_heads=128)
    assert choose_splits(many, num_tokens=16, num_reqs=1, batch_tokens=16, num_keys=131072) == 1


# ---- through the backend

# Two decodes, then a chunk over a long context and a short one.
SIZES = [(1, 20), (1, 7), (9, 4 * LEAST_KEYS), (3, 40)]
PLAIN = SETTINGS[0]
DTYPE = "bfloat16"


def builder_of(*, num_sms: int = 1024, invariant: bool = False) -> TritonAttentionBuilder:
    needs = replace(needs_of(PLAIN, dtype=DTYPE), batch_invariant=invariant)
    return TritonAttentionBuilder(needs, Platform(DEVICE, num_sms=num_sms), persistent_prefills=None)


def test_a_batch_with_a_short_chunk_over_a_long_context_is_split_and_equals_the_definition() -> None:
    batch = paged_batch(SIZES, PLAIN, dtype=DTYPE)
    backend = triton_backend(PLAIN, dtype=DTYPE, num_sms=1024)
    metadata = backend.builder.build(0, batch.common)
    assert metadata.prefills.splits == 4
    out = batch.run(backend, metadata)
    assert relative_error(out, batch.expected()) < 8e-3


def test_keys_are_not_split_where_results_must_not_depend_on_the_batch() -> None:
    common = paged_batch(SIZES, PLAIN, dtype=DTYPE).common
    assert builder_of().build(0, common).prefills.splits == 4
    assert builder_of(invariant=True).build(0, common).prefills.splits == 1


def test_keys_are_not_split_on_a_gpu_that_the_tiles_fill() -> None:
    common = paged_batch(SIZES, PLAIN, dtype=DTYPE).common
    assert builder_of(num_sms=2).build(0, common).prefills.splits == 1


def padded_batch(num_tokens: int, *, num_blocks: int) -> PaddedBatch:
    """The metadata of a captured step, whose prompts the host does not know."""
    table = torch.zeros(9, num_blocks, dtype=torch.int32, device=DEVICE)
    numbers = torch.zeros(10, dtype=torch.int32, device=DEVICE)
    slots = torch.full((num_tokens,), -1, dtype=torch.int64, device=DEVICE)
    return PaddedBatch(numbers[:8], table[:8], numbers, numbers[:9], table, num_tokens, slots)


def test_a_captured_step_is_split_as_far_as_the_gpu_has_room() -> None:
    batch = padded_batch(128, num_blocks=4096)
    room = builder_of(num_sms=64).build_padded(batch).prefills.splits
    assert 1 < room < builder_of(num_sms=1024).build_padded(batch).prefills.splits
    assert builder_of(num_sms=2).build_padded(batch).prefills.splits == 1


def test_a_captured_step_without_room_for_a_long_context_is_not_split() -> None:
    assert builder_of().build_padded(padded_batch(16, num_blocks=8)).prefills.splits == 1


def test_a_captured_step_is_padded() -> None:
    """Kernels that must not meet padding ask for it."""
    assert builder_of().build_padded(padded_batch(16, num_blocks=8)).prefills.padded
    assert not builder_of().build(0, paged_batch(SIZES, PLAIN, dtype=DTYPE).common).prefills.padded
