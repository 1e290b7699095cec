"""TRITON_ATTN: batches of every kind and with every feature by the definition of attention; what its builder plans."""

import pytest
import torch

from attention.backend import AttentionFeature, AttentionNeeds
from attention.backends.triton_attn import TritonAttention
from attention.platform import Platform
from attention.selection import reasons_against
from baton.kvcache.layout import GQA_LAYOUTS, KVCacheLayout
from baton.kvcache.spec import KVKind
from tests.conformance.attention.settings import SETTINGS, Setting
from tests.unit.attention.paged_batches import paged_batch, relative_error, triton_backend

PLAIN = SETTINGS[0]
# Those that take other ways through the backend; the conformance tests have all of them.
NAMES = ("plain", "window 7", "chunks of 128", "sinks", "encoder", "encoder to decoder", "fp8 e4m3 cache")
OURS = [{setting.name: setting for setting in SETTINGS}[name] for name in NAMES]
FRESH = [(1, 0), (1, 12), (9, 0), (2, 0)]
MIXED = [(1, 0), (1, 20), (9, 0), (2, 15)]
# More decodes than a tile of the prefills' kernels has tokens.
BEHIND = [[*[(1, 5)] * 20, (3, context)] for context in (0, 4)]


def check(sizes: list[tuple[int, int]], setting: Setting, *, dtype: str = "float32", own_kv: bool = True) -> None:
    if not setting.reads_cache:
        sizes = [(new + context, 0) for new, context in sizes]
    batch, backend = paged_batch(sizes, setting, dtype=dtype), triton_backend(setting, dtype=dtype)
    out = batch.run(backend, backend.builder.build(0, batch.common), own_kv=own_kv)
    assert relative_error(out, batch.expected()) < {"float32": 1e-5, "float16": 2e-3, "bfloat16": 8e-3}[dtype]


@pytest.mark.parametrize("setting", OURS, ids=lambda setting: setting.name)
def test_decodes_and_prefills_equal_the_definition(setting: Setting) -> None:
    check(MIXED, setting, own_kv=setting.attn_type != "encoder_decoder")


@pytest.mark.parametrize("sizes", [[(1, 12), (1, 3)], [(5, 0), (11, 0)], [(5, 9), (1, 0)][::-1], FRESH, *BEHIND])
def test_batches_of_every_kind_equal_the_definition(sizes: list[tuple[int, int]]) -> None:
    check(sizes, PLAIN)


def test_keys_come_from_the_cache_where_the_call_has_none() -> None:
    check(FRESH, PLAIN, own_kv=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_any_dtype_is_computed(dtype: str) -> None:
    check(MIXED, PLAIN, dtype=dtype)


def test_rows_after_the_batch_stay_as_they_are() -> None:
    batch, backend = paged_batch(MIXED, PLAIN), triton_backend(PLAIN)
    metadata = backend.builder.build(0, batch.common)
    pad = (0, 0, 0, 0, 0, 3)
    q, k, v = (torch.nn.functional.pad(rows, pad, value=torch.nan) for rows in (batch.q_THD, *batch.new_kv()))
    out = torch.full_like(q, 7.0)
    backend.forward(q, k, v, batch.kv_layer, metadata, layer=batch.layer, out=out)
    assert relative_error(out[:-3], batch.expected()) < 1e-5
    assert (out[-3:] == 7.0).all()


def test_layers_of_one_batch_may_see_different_keys() -> None:
    batch, backend = paged_batch(MIXED, PLAIN), triton_backend(PLAIN)
    metadata = backend.builder.build(0, batch.common)
    expected = batch.run(backend, metadata)
    for setting in (SETTINGS[2], SETTINGS[5], PLAIN):
        windowed = paged_batch(MIXED, setting)
        assert relative_error(windowed.run(backend, metadata), windowed.expected()) < 1e-5
    assert torch.equal(batch.run(backend, metadata), expected)


def test_a_later_batch_is_planned_for_windows_that_an_earlier_one_brought() -> None:
    setting = SETTINGS[2]
    backend = triton_backend(PLAIN)
    for sizes in ([(1, 30), (1, 5)], [(1, 2), (1, 60), (1, 17)]):
        batch = paged_batch(sizes, setting)
        out = batch.run(backend, backend.builder.build(0, batch.common))
        assert relative_error(out, batch.expected()) < 1e-5


def test_padded_requests_of_a_captured_graph_come_to_zero_and_read_nothing() -> None:
    batch, backend = paged_batch([(1, 12), (1, 30), (1, 3)], PLAIN), triton_backend(PLAIN)
    expected = batch.expected()
    batch.common.seq_lens[2] = 0
    batch.common.block_table_tensor[2] = 2**30
    batch.q_THD[2] = torch.nan
    out = batch.run(backend, backend.builder.build_for_cudagraph_capture(batch.common))
    assert relative_error(out[:2], expected[:2]) < 1e-5
    assert not out[2].any()


def test_graphs_are_for_batches_of_decodes() -> None:
    builder = triton_backend(PLAIN).builder
    assert builder.can_run_in_cudagraph(paged_batch([(1, 12), (1, 3)], PLAIN).common)
    assert not builder.can_run_in_cudagraph(paged_batch([(1, 12), (2, 3)], PLAIN).common)


def test_decodes_are_brought_to_the_front() -> None:
    rows = [5, 1, 7, 1]

    def swap(i: int, j: int) -> None:
        rows[i], rows[j] = rows[j], rows[i]

    assert triton_backend(PLAIN).builder.reorder_batch(tuple(rows), swap)
    assert rows[:2] == [1, 1]


@pytest.mark.parametrize("layout", GQA_LAYOUTS, ids=lambda layout: layout.label)
@pytest.mark.parametrize("kv_dtype", ["", "float8_e4m3fn", "float8_e5m2"])
def test_it_offers_itself_for_everything_but_block_sparsity(layout: KVCacheLayout, kv_dtype: str) -> None:
    features = frozenset(AttentionFeature) - {AttentionFeature.BLOCK_SPARSE}
    needs = AttentionNeeds(KVKind.GQA, "cuda:0", "bfloat16", 80, 16, layout, features, kv_dtype)
    hopper = Platform("cuda", compute_capability=(9, 0), num_sms=132)
    assert reasons_against(TritonAttention.capabilities, needs, hopper) == ()
