"""Some decodes share keys. Reading these once changes the work, never the result, and the host need not wait."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention.backends.triton_attn import TritonAttention
from attention.kernels.paged.split import SplitLayer
from attention.parameters import AttentionParameters
from attention.platform import Platform
from attention.prefix_group import GroupCosts, PrefixGroup, new_prefix_group
from tests.conformance.attention.settings import SETTINGS, Setting
from tests.device import DEVICE
from tests.unit.attention.paged_batches import (
    BLOCK_SIZE,
    PagedBatch,
    needs_of,
    paged_batch,
    relative_error,
    triton_backend,
)

PLAIN = SETTINGS[0]
BY_NAME = {setting.name: setting for setting in SETTINGS}
PREFIX = 2 * BLOCK_SIZE
NOBODY = 2**30
# The third row has fewer keys than the others share.
SIZES = [(1, PREFIX), (1, PREFIX + 3), (1, 3), (1, PREFIX + BLOCK_SIZE + 5), (1, 5 * BLOCK_SIZE)]
GROUPS = {
    "the first rows": (0, 1),
    "rows with others between": (1, 3, 4),
    "one row": (3,),
    "all that have the keys": (0, 1, 3, 4),
    "none": (),
}
LLAMA = SplitLayer(num_heads=32, num_kv_heads=8, value_size=128, num_sms=132)


def group_of(batch: PagedBatch) -> PrefixGroup:
    return new_prefix_group(8, batch.common.block_table_tensor.shape[1], torch.device(DEVICE))


def run(batch: PagedBatch, group: PrefixGroup, backend: TritonAttention | None = None) -> Tensor:
    backend = backend or triton_backend(batch.setting)
    return batch.run(backend, backend.builder.build_with_prefix(batch.common, group))


def hide_shared_blocks(batch: PagedBatch, places: tuple[int, ...]) -> None:
    """Lets only the group's first row have the blocks of the keys that it shares."""
    for place in places[1:]:
        batch.common.block_table_tensor[place, : PREFIX // BLOCK_SIZE] = NOBODY


@pytest.mark.parametrize("places", GROUPS.values(), ids=GROUPS)
def test_the_result_is_that_of_attention_to_all_keys(places: tuple[int, ...]) -> None:
    batch = paged_batch(SIZES, PLAIN, prefix_blocks=2)
    expected, group = batch.expected(), group_of(batch)
    hide_shared_blocks(batch, places)
    group.fill(places, PREFIX)
    assert relative_error(run(batch, group), expected) < 1e-5


def test_the_keys_of_a_group_may_be_split_among_programs() -> None:
    batch = paged_batch([(1, 2085), (1, 2100), (1, 2080)], PLAIN, prefix_blocks=260)
    expected, group = batch.expected(), group_of(batch)
    group.fill((0, 2), 260 * BLOCK_SIZE)
    backend = triton_backend(PLAIN, num_sms=16)
    metadata = backend.builder.build_with_prefix(batch.common, group)
    assert metadata.prefix is not None
    assert metadata.prefix.splits > 1
    batch.common.block_table_tensor[2, :260] = NOBODY
    assert relative_error(batch.run(backend, metadata), expected) < 1e-5


@pytest.mark.parametrize("name", ["soft cap", "sinks", "fp8 e4m3 cache"])
def test_features_that_count_no_positions(name: str) -> None:
    batch = paged_batch(SIZES, BY_NAME[name], prefix_blocks=2)
    group = group_of(batch)
    group.fill((0, 1, 3), PREFIX)
    assert relative_error(run(batch, group), batch.expected()) < 1e-5


@pytest.mark.parametrize("name", ["window 7", "window and sinks", "chunks of 128"])
def test_a_layer_that_counts_positions_reads_each_rows_keys_as_usual(name: str) -> None:
    """In a model whose other layers share keys."""
    batch = paged_batch(SIZES, BY_NAME[name], prefix_blocks=2)
    group = group_of(batch)
    group.fill((0, 1, 3), PREFIX)
    assert relative_error(run(batch, group), batch.expected()) < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_any_dtype_is_computed(dtype: str) -> None:
    batch = paged_batch(SIZES, PLAIN, dtype=dtype, prefix_blocks=2)
    group = group_of(batch)
    group.fill((0, 1, 3), PREFIX)
    out = run(batch, group, triton_backend(PLAIN, dtype=dtype))
    assert relative_error(out, batch.expected()) < {"float16": 2e-3, "bfloat16": 8e-3}[dtype]


def test_the_same_step_follows_each_group_and_padding() -> None:
    """As a replay does: only the buffers change."""
    batch, backend = paged_batch(SIZES, PLAIN, prefix_blocks=2), triton_backend(PLAIN)
    expected, group, table = batch.expected(), group_of(batch), batch.common.block_table_tensor.clone()
    for places, num_keys in (((0, 1, 3), PREFIX), ((3, 4), BLOCK_SIZE), ((), 0), ((1, 3, 4), PREFIX)):
        batch.common.block_table_tensor.copy_(table)
        group.fill(places, num_keys)
        assert relative_error(run(batch, group, backend), expected) < 1e-5
    batch.common.seq_lens[4] = 0
    batch.common.block_table_tensor[4] = NOBODY
    group.fill((1, 3), PREFIX)
    out = run(batch, group, backend)
    assert relative_error(out[:4], expected[:4]) < 1e-5
    assert not out[4].any()


def test_tables_are_split_after_the_shared_keys() -> None:
    batch = paged_batch(SIZES, PLAIN, prefix_blocks=2)
    group, table = group_of(batch), batch.common.block_table_tensor.tolist()
    group.fill((1, 3), PREFIX)
    group.split(batch.common, BLOCK_SIZE)
    assert group.rows.tolist() == [1, 4]
    assert group.num_keys.tolist() == [PREFIX]
    assert group.own_lens_N[:5].tolist() == [PREFIX + 1, 4, 4, BLOCK_SIZE + 6, 5 * BLOCK_SIZE + 1]
    tables = group.tables.tolist()
    assert tables[0][:2] == table[1][:2]
    assert tables[1][:3] == table[0][:3]
    assert tables[2][0] == table[1][2]
    assert tables[4][:2] == table[3][2:4]


@pytest.mark.parametrize(
    ("num_rows", "span", "num_keys", "worth"),
    [
        (64, 64, 8192, True),
        (32, 64, 8192, True),
        (8, 8, 8192, True),
        (8, 8, 4096, False),  # little is read twice
        (64, 64, 512, False),  # more launches
        (8, 1024, 8192, False),  # most of the computed rows are not of the group
    ],
)
def test_a_group_is_worth_it_where_it_saves_more_than_it_costs(
    num_rows: int, span: int, num_keys: int, worth: bool
) -> None:
    costs = GroupCosts.of(LLAMA, itemsize=2)
    assert (costs.saved(num_rows=num_rows, span=span, num_keys=num_keys) > 0) is worth


def test_less_is_saved_where_keys_have_8_bits() -> None:
    saved = [GroupCosts.of(LLAMA, itemsize).saved(num_rows=64, span=64, num_keys=1024) for itemsize in (1, 2)]
    assert saved[0] < 0 < saved[1]


def builder_of(setting: Setting, *layers: AttentionParameters, invariant: bool = False) -> GroupCosts | None:
    needs = needs_of(setting)
    named = {str(index): layer for index, layer in enumerate(layers)}
    backend = TritonAttention(
        replace(needs, layers=named, batch_invariant=invariant), Platform(DEVICE, num_sms=4), context_workspace_tokens=0
    )
    return backend.builder.group_costs()


def test_keys_are_shared_only_where_a_layers_scores_allow_it_and_never_if_batches_must_not_matter() -> None:
    whole, windowed = AttentionParameters(0.3), AttentionParameters(0.3, sliding_window=7)
    assert builder_of(PLAIN, windowed, whole) is not None
    assert builder_of(PLAIN, windowed) is None
    assert builder_of(PLAIN, whole, invariant=True) is None
    assert builder_of(BY_NAME["ALiBi"], whole) is None
