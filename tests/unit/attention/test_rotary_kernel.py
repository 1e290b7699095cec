"""The kernels that norm, turn and store in one launch leave everything as their twins do: norms and rotations of plain
torch, then a write of the cache.

Legend: T tokens, H query heads, K kv heads, X channels of all heads, D channels, C latent plus rotary channels.
"""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import rms_norm

from attention.kernels.rotary.heads import rotate_qkv
from attention.kernels.rotary.latents import rotate_latents
from attention.kernels.rotary.turn import turn_heads
from attention.rotation import HeadNorms, Rotation
from baton.kvcache.access import store_kv, store_latent
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import GQA_LAYOUTS, MLA_LAYOUTS, KVCacheLayout
from baton.kvcache.tokens import WriteIndex
from tests.device import DEVICE
from tests.unit.kvcache.caches import block_sizes, copy_of, new_cache, spec_of

NUM_BLOCKS, HEADS, KV_HEADS = 7, 5, 3
LATENT, ROTARY, NOPE = 12, 6, 4
CACHE_DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
K_SCALE, V_SCALE = torch.tensor(0.3), torch.tensor(0.007)
# Another order of summing, or a multiplication fused with an addition, may change a result by an ulp.
TOLERANCE = {torch.float32: (2e-6, 1e-6), torch.bfloat16: (2**-7, 2**-9)}
by_interleaved = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@dataclass(frozen=True)
class Norm:
    weight: Tensor
    eps: float
    weight_offset: int

    def __call__(self, x: Tensor, /) -> Tensor:
        weight = self.weight_offset + self.weight.float()
        return rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)

    def on_device(self) -> "Norm":
        return Norm(self.weight.to(DEVICE), self.eps, self.weight_offset)


def norm_of(size: int, dtype: torch.dtype, offset: int) -> Norm:
    return Norm((torch.rand(size) + 0.5).to(dtype), 1e-5, offset)


def rotation_of(num_tokens: int, pairs: int, *, interleaved: bool) -> Rotation:
    angles_TP = torch.rand(num_tokens, pairs) * 6
    return Rotation(angles_TP.cos() * 1.2, angles_TP.sin() * 1.2, interleaved)


def to_device(rotation: Rotation) -> Rotation:
    return Rotation(rotation.cos_TP.to(DEVICE), rotation.sin_TP.to(DEVICE), rotation.interleaved)


def with_margins(x_TX: Tensor) -> Tensor:
    """The same rows on the device, with NaN between them."""
    wide_TX = torch.full((x_TX.shape[0], x_TX.shape[1] + 16), torch.nan, dtype=x_TX.dtype, device=DEVICE)
    wide_TX[:, 8:-8] = x_TX.to(DEVICE)
    rows_TX: Tensor = wide_TX[:, 8:-8]
    return rows_TX


def assert_near(ours: Tensor, expected: Tensor) -> None:
    rtol, atol = TOLERANCE[expected.dtype]
    torch.testing.assert_close(ours.cpu(), expected, rtol=rtol, atol=atol, equal_nan=True)


def assert_same(stored: PagedKVCache, expected: PagedKVCache) -> None:
    """The hardware chooses which NaN is stored."""
    torch.testing.assert_close(stored.view.cpu().float(), expected.view.cpu().float(), rtol=0, atol=0, equal_nan=True)


def turned(qkv_TX: Tensor, rotation: Rotation, norms: HeadNorms | None) -> tuple[Tensor, Tensor, Tensor]:
    """The twin's queries, keys and values."""
    heads = [HEADS, KV_HEADS, KV_HEADS]
    q_THD, k_TKD, v_TKD = qkv_TX.unflatten(-1, (sum(heads), -1)).split(heads, dim=1)
    if norms is not None:
        q_THD, k_TKD = norms.q(q_THD), norms.k(k_TKD)
    return rotation.apply(q_THD), rotation.apply(k_TKD), v_TKD


def heads_of(qkv_TX: Tensor) -> Tensor:
    heads_TXD: Tensor = qkv_TX.unflatten(-1, (HEADS + 2 * KV_HEADS, -1))
    return heads_TXD


@by_interleaved
@by_dtype
@pytest.mark.parametrize(
    ("head_dim", "pairs"), [(8, 4), (12, 6), (40, 20), (12, 4), (40, 5), (7, 2)], ids=lambda size: str(size)
)
@pytest.mark.parametrize("offset", [None, 0, 1], ids=["plain", "normed", "normed by one more"])
def test_queries_and_keys_turn_in_place(
    interleaved: bool, dtype: torch.dtype, head_dim: int, pairs: int, offset: int | None
) -> None:
    """All channels of a head, or the first of them; a norm is of all in either case."""
    torch.manual_seed(0)
    qkv_TX = torch.randn(9, (HEADS + 2 * KV_HEADS) * head_dim).to(dtype)
    rotation = rotation_of(9, pairs, interleaved=interleaved)
    norms = our_norms = None
    if offset is not None:
        q_norm, k_norm = norm_of(head_dim, dtype, offset), norm_of(head_dim, dtype, offset)
        norms, our_norms = HeadNorms(q_norm, k_norm), HeadNorms(q_norm.on_device(), k_norm.on_device())
    ours_TX = with_margins(qkv_TX)
    rotate_qkv(ours_TX, to_device(rotation), num_heads=HEADS, num_kv_heads=KV_HEADS, norms=our_norms)
    assert_near(heads_of(ours_TX), torch.cat(turned(qkv_TX, rotation, norms), dim=1))


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(GQA_LAYOUTS), block_sizes, st.sampled_from(CACHE_DTYPES), st.booleans(), st.booleans(), st.data()
)
def test_keys_and_values_end_up_where_the_twin_puts_them(
    layout: KVCacheLayout, block_size: int, kv_dtype: str, interleaved: bool, in_16_bits: bool, draw: st.DataObject
) -> None:
    """What is stored is what the row then holds, to the bit; padded rows hold NaN, and reach nothing."""
    torch.manual_seed(0)
    slots = draw.draw(st.lists(st.integers(0, NUM_BLOCKS * block_size - 1), min_size=1, max_size=9, unique=True))
    slots = draw.draw(st.permutations([*slots, -1, -1]))
    num_tokens = len(slots) + draw.draw(st.integers(0, 2))
    dtype = torch.bfloat16 if in_16_bits else torch.float32
    qkv_TX = torch.randn(num_tokens, (HEADS + 2 * KV_HEADS) * 8).to(dtype)
    qkv_TX[:, (HEADS + KV_HEADS) * 8] = 1e6
    qkv_TX[torch.tensor([*slots, -1, -1])[:num_tokens] < 0] = torch.nan
    rotation = rotation_of(num_tokens, draw.draw(st.sampled_from((1, 3, 4))), interleaved=interleaved)
    expected = new_cache(spec_of(layout, kv_dtype), layout, block_size, NUM_BLOCKS)
    stored, ours_TX, slot_mapping = copy_of(expected, DEVICE), with_margins(qkv_TX), torch.tensor(slots)
    rotate_qkv(
        ours_TX,
        to_device(rotation),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        kv_layer=stored.layer(1),
        slot_mapping=slot_mapping.to(DEVICE),
        k_scale=K_SCALE.to(DEVICE),
        v_scale=V_SCALE.to(DEVICE),
    )
    assert_near(heads_of(ours_TX), torch.cat(turned(qkv_TX, rotation, None), dim=1))
    k_TKD, v_TKD = heads_of(ours_TX.cpu()).split([HEADS, KV_HEADS, KV_HEADS], dim=1)[1:]
    index = WriteIndex(slot_mapping, block_size)
    store_kv(expected.layer(1), k_TKD, v_TKD, index, k_scale=K_SCALE, v_scale=V_SCALE)
    assert_same(stored, expected)


def test_slots_past_the_rows_are_left_alone() -> None:
    """As in a captured graph whose slots lie in a longer buffer."""
    expected = new_cache(spec_of(KVCacheLayout.HND, "float32"), KVCacheLayout.HND, 4, NUM_BLOCKS)
    stored = copy_of(expected, DEVICE)
    ours_TX = with_margins(torch.randn(2, (HEADS + 2 * KV_HEADS) * 8))
    slots = torch.tensor([3, 9, 1, 2])
    rotate_qkv(
        ours_TX,
        to_device(rotation_of(2, 4, interleaved=False)),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        kv_layer=stored.layer(0),
        slot_mapping=slots.to(DEVICE),
    )
    k_TKD, v_TKD = heads_of(ours_TX.cpu()).split([HEADS, KV_HEADS, KV_HEADS], dim=1)[1:]
    store_kv(expected.layer(0), k_TKD, v_TKD, WriteIndex(slots[:2], 4))
    assert_same(stored, expected)


def test_gates_after_queries_stay_as_they_are_and_change_nothing() -> None:
    torch.manual_seed(0)
    norm, rotation = norm_of(8, torch.float32, 0).on_device(), to_device(rotation_of(4, 3, interleaved=False))
    plain_TX = torch.randn(4, (HEADS + 2 * KV_HEADS) * 8, device=DEVICE)
    gates_THD = torch.randn(4, HEADS, 8, device=DEVICE)
    q_TX, kv_TX = plain_TX.split([HEADS * 8, 2 * KV_HEADS * 8], dim=1)
    q_and_gate_THX = torch.cat((q_TX.unflatten(1, (HEADS, 8)), gates_THD), dim=2)
    gated_TX = torch.cat((q_and_gate_THX.flatten(1), kv_TX), dim=1)
    caches = [new_cache(spec_of(KVCacheLayout.HND, "float32"), KVCacheLayout.HND, 4, NUM_BLOCKS) for _ in range(2)]
    ours, expected = (copy_of(cache, DEVICE) for cache in caches)
    slots = torch.tensor([3, 9, 1, 2], device=DEVICE)
    rotate = partial(
        rotate_qkv, num_heads=HEADS, num_kv_heads=KV_HEADS, norms=HeadNorms(norm, norm), slot_mapping=slots
    )
    rotate(plain_TX, rotation, kv_layer=expected.layer(0))
    rotate(gated_TX, rotation, kv_layer=ours.layer(0), gated=True)
    q_and_gate_THX = gated_TX[:, : 2 * HEADS * 8].unflatten(1, (HEADS, 16))
    assert torch.equal(q_and_gate_THX[..., :8].flatten(1), plain_TX[:, : HEADS * 8])
    assert torch.equal(q_and_gate_THX[..., 8:], gates_THD)
    assert torch.equal(gated_TX[:, 2 * HEADS * 8 :], plain_TX[:, HEADS * 8 :])
    assert_same(ours, expected)


def test_a_heads_norm_does_not_depend_on_how_many_tokens_there_are() -> None:
    torch.manual_seed(0)
    qkv_TX = torch.randn(9, (HEADS + 2 * KV_HEADS) * 40, device=DEVICE)
    norm, rotation = norm_of(40, torch.float32, 0).on_device(), to_device(rotation_of(9, 20, interleaved=False))
    together_TX = qkv_TX.clone()
    norms = HeadNorms(norm, norm)
    rotate_qkv(together_TX, rotation, num_heads=HEADS, num_kv_heads=KV_HEADS, norms=norms)
    for token in (0, 5, 8):
        row = slice(token, token + 1)
        alone_TX = qkv_TX[row].clone()
        own = Rotation(rotation.cos_TP[row], rotation.sin_TP[row], interleaved=False)
        rotate_qkv(alone_TX, own, num_heads=HEADS, num_kv_heads=KV_HEADS, norms=norms)
        assert torch.equal(alone_TX[0], together_TX[token])


@by_interleaved
@by_dtype
@pytest.mark.parametrize("num_decodes", [0, 3, 9], ids=["prefills", "mixed", "decodes"])
def test_latents_turn_in_place_and_decodes_where_they_are_wanted(
    interleaved: bool, dtype: torch.dtype, num_decodes: int
) -> None:
    torch.manual_seed(0)
    q_THD = torch.randn(9, HEADS, NOPE + ROTARY).to(dtype)
    latent_TC = torch.randn(9, LATENT + ROTARY).to(dtype)
    norm, rotation = norm_of(LATENT, dtype, 0), rotation_of(9, ROTARY // 2, interleaved=interleaved)
    ours_THD = with_margins(q_THD.flatten(1)).unflatten(-1, (HEADS, -1))
    ours_TC = with_margins(latent_TC)
    decode_q_THC = torch.full((num_decodes, HEADS, LATENT + ROTARY), 7.0, dtype=dtype, device=DEVICE)
    rotate_latents(
        ours_THD,
        ours_TC,
        to_device(rotation),
        norm=norm.on_device(),
        decode_q_THC=decode_q_THC if num_decodes else None,
    )
    pe_THR = rotation.apply(q_THD[..., NOPE:])
    assert_near(ours_THD[num_decodes:, :, NOPE:], pe_THR[num_decodes:])
    assert torch.equal(ours_THD[..., :NOPE].cpu(), q_THD[..., :NOPE])
    assert_near(decode_q_THC[..., LATENT:], pe_THR[:num_decodes])
    assert (decode_q_THC[..., :LATENT] == 7.0).all()
    assert_near(ours_TC[:, :LATENT], norm(latent_TC[:, :LATENT]))
    assert_near(ours_TC[:, LATENT:], rotation.apply(latent_TC[:, None, LATENT:])[:, 0])


@by_dtype
def test_normed_latents_are_multiplied_and_their_rotary_keys_are_not(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    latent_TC = torch.randn(9, LATENT + ROTARY).to(dtype)
    norm, rotation = norm_of(LATENT, dtype, 0), rotation_of(9, ROTARY // 2, interleaved=True)
    ours_TC = with_margins(latent_TC)
    q_THD = torch.randn(9, HEADS, NOPE + ROTARY, device=DEVICE).to(dtype)
    rotate_latents(q_THD, ours_TC, to_device(rotation), norm=norm.on_device(), multiplier=3.5)
    assert_near(ours_TC[:, :LATENT], norm(latent_TC[:, :LATENT]) * 3.5)
    assert_near(ours_TC[:, LATENT:], rotation.apply(latent_TC[:, None, LATENT:])[:, 0])


@pytest.mark.parametrize("layout", MLA_LAYOUTS, ids=lambda layout: layout.label)
@pytest.mark.parametrize("kv_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("num_tokens", [4, 5, 7], ids=["slots left over", "all", "padded"])
def test_latents_end_up_where_the_twin_puts_them(layout: KVCacheLayout, kv_dtype: str, num_tokens: int) -> None:
    """What is stored is what the row then holds, to the bit; padded rows hold NaN, and reach nothing."""
    torch.manual_seed(0)
    expected = new_cache(spec_of(layout, kv_dtype), layout, 4, NUM_BLOCKS)
    stored = copy_of(expected, DEVICE)
    channels = expected.spec.head_dim
    slot_mapping = torch.tensor([5, -1, 27, 0, 13])
    latent_TC = torch.randn(num_tokens, channels).bfloat16() * 100
    latent_TC[1] = torch.nan
    latent_TC[5:] = torch.nan
    ours_TC = with_margins(latent_TC)
    rotate_latents(
        torch.randn(num_tokens, HEADS, NOPE + ROTARY, device=DEVICE).bfloat16(),
        ours_TC,
        to_device(rotation_of(num_tokens, ROTARY // 2, interleaved=True)),
        norm=norm_of(channels - ROTARY, torch.bfloat16, 0).on_device(),
        kv_layer=stored.layer(1),
        slot_mapping=slot_mapping.to(DEVICE),
        scale=K_SCALE.to(DEVICE),
    )
    kv_c_TL, k_pe_TR = ours_TC.cpu().split([channels - ROTARY, ROTARY], dim=-1)
    index = WriteIndex(slot_mapping[:num_tokens], 4)
    store_latent(expected.layer(1), kv_c_TL, k_pe_TR, index, scale=K_SCALE)
    assert_same(stored, expected)


@by_interleaved
@by_dtype
def test_heads_of_one_tensor_turn_in_place(dtype: torch.dtype, *, interleaved: bool) -> None:
    """Some channels of a head turn, others stay; rows of the tensor lie apart."""
    torch.manual_seed(0)
    angles_TP = torch.randn(5, 3, device=DEVICE) * 3
    rotation = Rotation(angles_TP.cos(), angles_TP.sin(), interleaved)
    rows_TX = torch.randn(5, 3 * 20 + 4, device=DEVICE).to(dtype)
    x_THD = rows_TX[:, :60].unflatten(1, (3, 20))
    expected, rest = rotation.apply(x_THD), rows_TX[:, 60:].clone()
    turn_heads(x_THD, rotation)
    relative, absolute = TOLERANCE[dtype]
    torch.testing.assert_close(x_THD, expected, rtol=relative, atol=absolute)
    assert torch.equal(rows_TX[:, 60:], rest)
