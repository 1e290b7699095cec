"""The layers' own norms and rotation, which a GPU does together with the write of the cache, against the same in plain
torch followed by `forward`: outputs and caches.

Legend: T tokens, H query heads, K kv heads, D head size, X channels of all heads, C latent plus rotary channels.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from attention.backend import AttentionBackend, AttentionNeeds, MLABackend, MLADims, MLAMetadata
from attention.backends.torch_mla import TorchMLA
from attention.backends.torch_sdpa import TorchSDPA
from attention.backends.triton_attn import TritonAttention
from attention.backends.triton_mla import TritonMLA
from attention.layer import Attention
from attention.metadata import CommonAttentionMetadata, PaddedBatch, build_common_metadata
from attention.mla import MLAAttention
from attention.platform import probe_platform
from attention.rotation import HeadNorms, Rotation
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.scales import KVScales
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from tests.device import DEVICE

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 4
DIMS = MLADims(qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, kv_lora_rank=12)
CHANNELS = DIMS.kv_lora_rank + DIMS.qk_rope_head_dim
# New and computed tokens of the requests: first prompts alone, then decodes with a piece of a prompt after them.
STEPS = ([(3, 0), (6, 0), (5, 0)], [(1, 3), (1, 6), (4, 5)])
TABLES = [[7, 2], [0, 4], [5, 1, 3]]
NUM_BLOCKS = 8


@dataclass(frozen=True)
class Norm:
    weight: Tensor
    eps: float = 1e-5
    weight_offset: int = 0

    def __call__(self, x: Tensor, /) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


def norm_of(size: int) -> Norm:
    return Norm(torch.rand(size, device=DEVICE) + 0.5)


def rotation_of(num_tokens: int, pairs: int, *, interleaved: bool = False) -> Rotation:
    angles_TP = torch.rand(num_tokens, pairs, device=DEVICE) * 6
    return Rotation(angles_TP.cos(), angles_TP.sin(), interleaved)


def needs_of(kind: KVKind, kv_dtype: str) -> AttentionNeeds:
    sizes: dict[str, Any] = {"num_heads": HEADS, "num_kv_heads": KV_HEADS}
    head_size, layout = DIM, KVCacheLayout.HND
    if kind is KVKind.MLA:
        sizes, head_size, layout = {"num_heads": HEADS, "mla": DIMS}, CHANNELS, KVCacheLayout.LBNC
    sizes |= {"max_num_reqs": len(TABLES), "max_model_len": 3 * BLOCK}
    return AttentionNeeds(kind, DEVICE, "float32", head_size, BLOCK, layout, kv_dtype=kv_dtype, **sizes)


def gqa_backend(kv_dtype: str = "") -> AttentionBackend:
    """The fastest backend on this machine: other tests cover its attention."""
    backend = TritonAttention if DEVICE == "cuda" else TorchSDPA
    return backend(needs_of(KVKind.GQA, kv_dtype), probe_platform(DEVICE), context_workspace_tokens=0)


def mla_backend(kv_dtype: str) -> MLABackend:
    backend = TritonMLA if DEVICE == "cuda" else TorchMLA
    return backend(needs_of(KVKind.MLA, kv_dtype), probe_platform(DEVICE), context_workspace_tokens=8)


def new_cache(needs: AttentionNeeds) -> PagedKVCache:
    """A poisoned cache, so that a read of an unwritten slot shows."""
    spec = KVCacheSpec(needs.kind, 2, needs.num_kv_heads, needs.head_size, needs.cache_dtype)
    cache = PagedKVCache(spec, KVCacheShape(needs.layout, BLOCK, NUM_BLOCKS), DEVICE)
    cache.memory.fill_(0xFF)
    return cache


def common_of(step: list[tuple[int, int]]) -> CommonAttentionMetadata:
    return build_common_metadata(
        query_lens=[new for new, _ in step],
        context_lens=[computed for _, computed in step],
        block_tables=TABLES,
        block_size=BLOCK,
        device=DEVICE,
    )[0]


def assert_near(ours: Tensor, expected: Tensor, kv_dtype: str) -> None:
    """A number that is rounded to 8 bits may fall to either side."""
    ours, expected = ours.float().nan_to_num(7.0), expected.float().nan_to_num(7.0)
    assert (ours - expected).norm() <= (2e-2 if kv_dtype else 1e-5) * expected.norm()


def scales_for(kv_dtype: str, *, calculate: bool) -> KVScales | None:
    return KVScales(k_scale=0.02, v_scale=0.03, calculate=calculate).to(DEVICE) if kv_dtype else None


def latent_projection() -> nn.Linear:
    projection = nn.Linear(DIMS.kv_lora_rank, HEADS * (DIMS.qk_nope_head_dim + DIMS.v_head_dim), bias=False)
    return projection.to(DEVICE).requires_grad_(requires_grad=False)


def latent_layer(backend: MLABackend, projection: nn.Linear, scales: KVScales | None = None) -> MLAAttention:
    layer = MLAAttention(
        num_heads=HEADS, qk_nope_head_dim=DIMS.qk_nope_head_dim, qk_rope_head_dim=DIMS.qk_rope_head_dim,
        v_head_dim=DIMS.v_head_dim, kv_lora_rank=DIMS.kv_lora_rank, scale=0.3, layer_index=1, kv_b_proj=projection,
        backend=backend, scales=scales,
    )  # fmt: skip
    layer.process_weights_after_loading()
    return layer


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [DIM // 2, 3], ids=["all channels turn", "some channels turn"])
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("kv_dtype", "calculate"), [("", False), ("float8_e4m3fn", False), ("float8_e4m3fn", True)])
def test_outputs_and_caches_of_keys_and_values_are_equal(
    interleaved: bool, pairs: int, with_norms: bool, gated: bool, kv_dtype: str, calculate: bool
) -> None:
    torch.manual_seed(0)
    backend = gqa_backend(kv_dtype)
    layers = [
        Attention(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scale=0.3, layer_index=1, backend=backend,
            scales=scales_for(kv_dtype, calculate=calculate),
        )
        for _ in range(2)
    ]  # fmt: skip
    caches = [new_cache(needs_of(KVKind.GQA, kv_dtype)) for _ in layers]
    norms = HeadNorms(norm_of(DIM), norm_of(DIM)) if with_norms else None
    for step in STEPS:
        metadata, num_tokens = backend.builder.build(0, common_of(step)), sum(new for new, _ in step)
        qkv_TX = torch.randn(num_tokens, (HEADS + 2 * KV_HEADS) * DIM, device=DEVICE)
        rotation = rotation_of(num_tokens, pairs, interleaved=interleaved)
        q_THD, k_TKD, v_TKD = qkv_TX.clone().unflatten(-1, (-1, DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        if norms is not None:
            q_THD, k_TKD = norms.q(q_THD), norms.k(k_TKD)
        expected = layers[0](rotation.apply(q_THD), rotation.apply(k_TKD), v_TKD, caches[0], metadata)
        if gated:
            q_TX, kv_TX = qkv_TX.split([HEADS * DIM, 2 * KV_HEADS * DIM], dim=1)
            gates_THD = torch.full((num_tokens, HEADS, DIM), torch.nan, device=DEVICE)
            q_and_gate_TX = torch.cat((q_TX.unflatten(-1, (HEADS, DIM)), gates_THD), dim=-1).flatten(1)
            qkv_TX = torch.cat((q_and_gate_TX, kv_TX), dim=1)
        ours = layers[1].rotate_and_attend(qkv_TX, rotation, caches[1], metadata, norms=norms, gated=gated)
        assert_near(ours, expected, kv_dtype)
        assert_near(caches[1].view, caches[0].view, kv_dtype)


def test_a_layer_that_shares_keys_writes_none() -> None:
    torch.manual_seed(0)
    backend = gqa_backend()
    sizes: dict[str, Any] = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "scale": 0.3}
    target = Attention(**sizes, layer_index=0, backend=backend)
    layer = Attention(**sizes, layer_index=1, backend=backend, kv_sharing_target=target)
    cache = new_cache(needs_of(KVKind.GQA, ""))
    metadata, rotation = backend.builder.build(0, common_of(STEPS[0])), rotation_of(14, DIM // 2)
    qkv_TX = torch.randn(14, (HEADS + 2 * KV_HEADS) * DIM, device=DEVICE)
    q_THD = qkv_TX.clone().unflatten(-1, (-1, DIM))[:, :HEADS]
    target.rotate_and_attend(qkv_TX.clone(), rotation, cache, metadata)
    before = cache.memory.clone()
    ours = layer.rotate_and_attend(qkv_TX, rotation, cache, metadata)
    assert torch.equal(cache.memory, before)
    assert_near(ours, layer(rotation.apply(q_THD), None, None, cache, metadata), "")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("kv_dtype", "calculate"), [("", False), ("float8_e4m3fn", False), ("float8_e4m3fn", True)])
def test_outputs_and_caches_of_latents_are_equal(interleaved: bool, kv_dtype: str, calculate: bool) -> None:
    torch.manual_seed(0)
    backend = mla_backend(kv_dtype)
    projection = latent_projection()
    layers = [latent_layer(backend, projection, scales_for(kv_dtype, calculate=calculate)) for _ in range(2)]
    caches = [new_cache(needs_of(KVKind.MLA, kv_dtype)) for _ in layers]
    norm = norm_of(DIMS.kv_lora_rank)
    for step in STEPS:
        metadata, num_tokens = backend.builder.build(0, common_of(step)), sum(new for new, _ in step)
        q_THD = torch.randn(num_tokens, HEADS, DIMS.qk_nope_head_dim + DIMS.qk_rope_head_dim, device=DEVICE)
        latent_TC = torch.randn(num_tokens, CHANNELS, device=DEVICE)
        rotation = rotation_of(num_tokens, DIMS.qk_rope_head_dim // 2, interleaved=interleaved)
        nope, rank = DIMS.qk_nope_head_dim, DIMS.kv_lora_rank
        turned_THD = torch.cat((q_THD[..., :nope], rotation.apply(q_THD[..., nope:])), dim=-1)
        k_pe_TR = rotation.apply(latent_TC[:, None, rank:])[:, 0]
        assert isinstance(metadata, MLAMetadata)
        expected = layers[0](turned_THD, norm(latent_TC[:, :rank]), k_pe_TR, caches[0], metadata)
        ours = layers[1].rotate_and_attend(q_THD, latent_TC, rotation, caches[1], metadata, norm=norm)
        assert_near(ours, expected, kv_dtype)
        assert_near(caches[1].view, caches[0].view, kv_dtype)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_padded_step_with_prompts_among_the_first_tokens_gives_what_one_without_padding_gives(
    batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a captured step: the first tokens are computed as decodes too, which must leave prompts' queries turned."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    torch.manual_seed(0)
    needs = replace(needs_of(KVKind.MLA, ""), batch_invariant=batch_invariant)
    backend = TritonMLA(needs, probe_platform(DEVICE), context_workspace_tokens=8)
    layer = latent_layer(backend, latent_projection())
    norm, size = norm_of(DIMS.kv_lora_rank), 16
    q_THD = torch.randn(size, HEADS, DIMS.qk_nope_head_dim + DIMS.qk_rope_head_dim, device=DEVICE)
    latent_TC = torch.randn(size, CHANNELS, device=DEVICE)
    rotation = rotation_of(size, DIMS.qk_rope_head_dim // 2)
    for step in ([(3, 0), (6, 0), (5, 0)], [(1, 3), (6, 0), (5, 0)], [(1, 3), (1, 6), (1, 5)]):
        common, num_tokens = common_of(step), sum(new for new, _ in step)
        caches = [new_cache(needs_of(KVKind.MLA, "")) for _ in range(2)]
        for cache in caches:
            cache.memory.zero_()
        decodes = sum(computed > 0 for _, computed in step)
        seq_lens = torch.zeros(8, dtype=torch.int32, device=DEVICE)
        seq_lens[:decodes] = common.seq_lens[:decodes]
        table = torch.zeros(8, common.block_table_tensor.shape[1], dtype=torch.int32, device=DEVICE)
        table[:3] = common.block_table_tensor
        slots = torch.full((size,), -1, dtype=torch.int64, device=DEVICE)
        slots[:num_tokens] = common.slot_mapping
        starts = [*common.query_start_loc.tolist()[decodes:], size]
        prompts = len(starts) - 2
        padded = PaddedBatch(
            decode_seq_lens=seq_lens,
            decode_table=table,
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
            seq_lens=torch.tensor([*common.seq_lens.tolist()[decodes:], 0], dtype=torch.int32, device=DEVICE),
            block_table=torch.cat((common.block_table_tensor[decodes:], table[:1]))[: prompts + 1],
            max_query_len=size,
            slot_mapping=slots,
        )
        whole = Rotation(rotation.cos_TP[:num_tokens], rotation.sin_TP[:num_tokens], interleaved=False)
        metadata = backend.builder.build(0, common)
        expected = layer.rotate_and_attend(
            q_THD[:num_tokens].clone(), latent_TC[:num_tokens].clone(), whole, caches[0], metadata, norm=norm
        )
        ours = layer.rotate_and_attend(
            q_THD.clone(), latent_TC.clone(), rotation, caches[1], backend.builder.build_padded(padded), norm=norm
        )
        assert_near(ours[:num_tokens], expected, "")
        assert not ours.isnan().any()
        assert torch.equal(caches[1].memory, caches[0].memory)
