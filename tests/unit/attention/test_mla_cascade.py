"""Some decodes over latents share keys. Attending to these in tiles of rows changes the work, never the result."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from attention.backend import AttentionNeeds, MLADims
from attention.backends.triton_mla import TritonMLA, TritonMLAMetadata
from attention.metadata import CommonAttentionMetadata, build_common_metadata
from attention.mla_cascade import LatentGroupCosts
from attention.parameters import AttentionParameters
from attention.platform import Platform
from attention.prefix_group import PrefixGroup, new_prefix_group
from baton.kvcache.cache import TORCH_DTYPES
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.scales import KVScales
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from tests.conformance.attention.batches import poisoned_cache
from tests.conformance.attention.oracle import relative_error
from tests.device import DEVICE

# On a GPU the sizes of the DeepSeek models, which Hopper has a kernel of its own for.
LATENT, ROTARY, BLOCK_SIZE = (512, 64, 64) if DEVICE == "cuda" else (12, 4, 8)
SCALE, KV_SCALE = 0.3, 0.25
PREFIX = 2 * BLOCK_SIZE
NOBODY = 2**30
# Each row's keys. The third row has fewer than the others share.
LENS = [PREFIX + 1, PREFIX + 4, 4, PREFIX + BLOCK_SIZE + 6, 5 * BLOCK_SIZE + 1]
GROUPS = {
    "the first rows": (0, 1),
    "rows with others between": (1, 3, 4),
    "one row": (3,),
    "all that have the keys": (0, 1, 3, 4),
    "none": (),
}
# The products' operands are rounded; the interpreter truncates where it stores bfloat16.
ERROR = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.2e-2}


def needs_of(*, num_heads: int = 4, dtype: str = "float32", kv_dtype: str = "", top_k: int = 0) -> AttentionNeeds:
    return AttentionNeeds(
        KVKind.MLA, DEVICE, dtype, LATENT + ROTARY, BLOCK_SIZE, KVCacheLayout.LBNC, kv_dtype=kv_dtype,
        num_heads=num_heads, max_num_reqs=8, max_model_len=1024, mla=MLADims(16, ROTARY, 16, LATENT, top_k),
    )  # fmt: skip


def backend_of(needs: AttentionNeeds, *, num_sms: int = 4) -> TritonMLA:
    return TritonMLA(needs, Platform(DEVICE, num_sms=num_sms), context_workspace_tokens=8)


@dataclass(frozen=True)
class LatentBatch:
    """One decode a row, over a poisoned cache. `latents`: each row's, as the cache holds them, times its scale."""

    needs: AttentionNeeds
    common: CommonAttentionMetadata
    kv_layer: Tensor
    q_RHC: Tensor
    latents: list[Tensor]

    def group(self) -> PrefixGroup:
        return new_prefix_group(8, self.common.block_table_tensor.shape[1], torch.device(DEVICE))

    def run(self, group: PrefixGroup, backend: TritonMLA | None = None) -> Tensor:
        backend = backend or backend_of(self.needs)
        out = torch.full_like(self.q_RHC[..., :LATENT], torch.nan, memory_format=torch.contiguous_format)
        scales = KVScales(k_scale=KV_SCALE, v_scale=KV_SCALE).to(DEVICE) if self.needs.kv_dtype else None
        metadata = backend.builder.build_with_prefix(self.common, group)
        layer = AttentionParameters(SCALE, scales=scales)
        backend.forward(self.q_RHC, None, None, self.kv_layer, metadata, layer=layer, out=out)
        return out

    def expected(self) -> Tensor:
        rows = []
        for q_HC, latents_SC in zip(self.q_RHC.double(), self.latents, strict=True):
            weights_HS = (q_HC @ latents_SC.T * SCALE).softmax(-1)
            rows.append(weights_HS @ latents_SC[:, :LATENT])
        return torch.stack(rows)

    def hide_shared_blocks(self, places: tuple[int, ...]) -> None:
        """Lets only the group's first row have the blocks of the keys that it shares."""
        for place in places[1:]:
            self.common.block_table_tensor[place, : PREFIX // BLOCK_SIZE] = NOBODY


def latent_batch(needs: AttentionNeeds, lens: list[int] = LENS, *, shared_blocks: int = 2) -> LatentBatch:
    torch.manual_seed(0)
    counts = [-(-length // BLOCK_SIZE) for length in lens]
    dealt = iter(torch.randperm(sum(counts) + 3).tolist())
    stem = [next(dealt) for _ in range(shared_blocks)]
    tables = [stem[:count] + [next(dealt) for _ in range(count - shared_blocks)] for count in counts]
    spec = KVCacheSpec(KVKind.MLA, 1, 1, LATENT + ROTARY, needs.cache_dtype)
    shape = KVCacheShape(needs.layout, BLOCK_SIZE, sum(counts) + 3)
    kv_layer = poisoned_cache(spec, shape, DEVICE).layer(0)
    written = torch.randn(kv_layer.shape).to(DEVICE, TORCH_DTYPES[needs.cache_dtype])
    latents = []
    for table, length in zip(tables, lens, strict=True):
        positions = torch.arange(length)
        blocks, offsets = torch.tensor(table)[positions // BLOCK_SIZE], positions % BLOCK_SIZE
        raw = written.view(torch.uint8)[0, blocks, offsets]
        kv_layer.view(torch.uint8)[0, blocks, offsets] = raw
        latents.append(written.double()[0, blocks, offsets, 0] * (KV_SCALE if needs.kv_dtype else 1.0))
    common, _ = build_common_metadata(
        query_lens=[1] * len(lens),
        context_lens=[length - 1 for length in lens],
        block_tables=tables,
        block_size=BLOCK_SIZE,
        device=DEVICE,
    )
    q_RHC = torch.randn(len(lens), needs.num_heads, LATENT + ROTARY).to(DEVICE, TORCH_DTYPES[needs.dtype])
    return LatentBatch(needs, common, kv_layer, q_RHC, latents)


@pytest.mark.parametrize("num_heads", [4, 16, 20, 70])
@pytest.mark.parametrize("places", GROUPS.values(), ids=GROUPS)
def test_the_result_is_that_of_attention_to_all_keys(places: tuple[int, ...], num_heads: int) -> None:
    """In tiles of 16, 4, 2 rows and of 1; the last one may have fewer."""
    batch = latent_batch(needs_of(num_heads=num_heads))
    group = batch.group()
    batch.hide_shared_blocks(places)
    group.fill(places, PREFIX)
    assert relative_error(batch.run(group), batch.expected()) < ERROR["float32"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kv_dtype", ["", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("num_heads", [8, 16, 24, 32] if DEVICE == "cuda" else [16])
def test_any_dtype_is_computed(num_heads: int, kv_dtype: str, dtype: str) -> None:
    batch = latent_batch(needs_of(num_heads=num_heads, dtype=dtype, kv_dtype=kv_dtype))
    group = batch.group()
    group.fill((0, 1, 3), PREFIX)
    assert relative_error(batch.run(group), batch.expected()) < ERROR[dtype]


def test_the_shared_keys_may_be_split_among_programs() -> None:
    shared_blocks = 640 // BLOCK_SIZE
    batch = latent_batch(needs_of(num_heads=16), [645, 660, 641, 650, 643], shared_blocks=shared_blocks)
    group, expected = batch.group(), batch.expected()
    group.fill((0, 2, 4), 640)
    batch.common.block_table_tensor[[2, 4], :shared_blocks] = NOBODY
    assert relative_error(batch.run(group, backend_of(batch.needs, num_sms=7)), expected) < ERROR["float32"]


def test_the_same_step_follows_each_group_and_padding() -> None:
    """As a replay does: only the buffers change."""
    batch = latent_batch(needs_of(num_heads=16))
    backend, group, expected = backend_of(batch.needs), batch.group(), batch.expected()
    for places, num_keys in (((0, 1, 3), PREFIX), ((3, 4), BLOCK_SIZE), ((), 0), ((1, 3, 4), PREFIX)):
        group.fill(places, num_keys)
        assert relative_error(batch.run(group, backend), expected) < ERROR["float32"]
    batch.common.seq_lens[4] = 0
    batch.common.block_table_tensor[4] = NOBODY
    group.fill((1, 3), PREFIX)
    out = batch.run(group, backend)
    assert relative_error(out[:4], expected[:4]) < ERROR["float32"]
    assert not out[4].any()


def test_only_tiles_with_rows_of_the_group_read_the_shared_keys() -> None:
    batch = latent_batch(needs_of(num_heads=32))
    group = batch.group()
    group.fill((3, 4), PREFIX)
    metadata = backend_of(batch.needs).builder.build_with_prefix(batch.common, group)
    assert isinstance(metadata, TritonMLAMetadata)
    assert metadata.shared is not None
    assert metadata.shared.tile_lens_T.tolist() == [0, PREFIX, PREFIX]


def test_keys_are_shared_only_where_a_tile_has_several_rows_and_never_if_batches_must_not_matter() -> None:
    assert backend_of(needs_of(num_heads=32)).builder.group_costs() is not None
    assert backend_of(needs_of(num_heads=64)).builder.group_costs() is None
    assert backend_of(needs_of(top_k=4)).builder.group_costs() is None
    assert backend_of(replace(needs_of(), batch_invariant=True)).builder.group_costs() is None


@pytest.mark.parametrize(
    ("num_heads", "num_rows", "span", "num_keys", "worth"),
    [
        (16, 64, 64, 8192, True),
        (16, 256, 256, 2048, True),
        (16, 32, 32, 16384, True),
        (16, 8, 8, 4096, False),  # little is read twice
        (16, 64, 64, 512, False),  # more launches
        (16, 16, 1024, 16384, False),  # most tiles have one row of the group
        (32, 64, 64, 8192, False),  # a tile of two rows takes as long as both
    ],
)
def test_a_group_is_worth_it_where_it_saves_more_than_it_costs(
    num_heads: int, num_rows: int, span: int, num_keys: int, worth: bool
) -> None:
    needs = replace(needs_of(num_heads=num_heads, dtype="bfloat16"), head_size=576)
    costs = LatentGroupCosts.of(needs, num_sms=132)
    assert (costs.saved(num_rows=num_rows, span=span, num_keys=num_keys) > 0) is worth


def test_less_is_saved_where_keys_have_8_bits() -> None:
    needs = replace(needs_of(num_heads=16, dtype="bfloat16"), head_size=576)
    costs = [LatentGroupCosts.of(replace(needs, kv_dtype=kind), num_sms=132) for kind in ("float8_e4m3fn", "")]
    saved = [each.saved(num_rows=64, span=64, num_keys=8192) for each in costs]
    assert saved[0] < 0 < saved[1]
