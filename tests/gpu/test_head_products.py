"""The heads' products of latent decodes on a GPU, at the sizes of DeepSeek-V2-Lite and V3: near float64, strided as the
layer calls them, and the same bits whether they overlap with their neighbours or not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from attention.backend import AttentionNeeds, MLABackend, MLADims
from attention.backends.triton_mla import TritonMLA
from attention.kernels.mla.head_products import MAX_TOKENS, HeadProducts
from attention.metadata import build_common_metadata
from attention.mla import MLAAttention, library_heads_product
from attention.platform import probe_platform
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from baton.models.layers.norms import RMSNorm
from baton.tritonlib import launch
from tests.conformance.attention.oracle import relative_error

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
DIMS = MLADims(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512)
QUERY, VALUE, LATENT = DIMS.qk_nope_head_dim, DIMS.v_head_dim, DIMS.kv_lora_rank
CHANNELS = LATENT + DIMS.qk_rope_head_dim
V2_LITE_HEADS, V3_HEADS = 16, 128
LAYERS, KEYS = 6, 1000


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype, generator=torch.Generator(DEVICE).manual_seed(seed))


def weights_of(num_heads: int, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[Tensor, Tensor]:
    """W_UK and W_UV, views of one matrix."""
    weight_HXL = random(num_heads, QUERY + VALUE, LATENT, dtype=dtype, seed=seed) * LATENT**-0.5
    return weight_HXL[:, :QUERY], weight_HXL[:, QUERY:].transpose(1, 2)


def product() -> HeadProducts:
    return HeadProducts(torch.cuda.get_device_properties(DEVICE).multi_processor_count)


def captured(step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_heads", [V2_LITE_HEADS, V3_HEADS])
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 9, 17, 32, MAX_TOKENS + 1])
def test_both_products_are_near_float64(num_tokens: int, num_heads: int, dtype: torch.dtype) -> None:
    w_uk_HPL, w_uv_HLV = weights_of(num_heads, dtype=dtype)
    q_THD = random(num_tokens, num_heads, QUERY + 64, dtype=dtype, seed=1)
    attended_THL = random(num_tokens, num_heads, LATENT, dtype=dtype, seed=2)
    out_THC = torch.full((num_tokens, num_heads, CHANNELS), torch.nan, dtype=dtype, device=DEVICE)
    out_THV = torch.full((num_tokens + 1, num_heads, VALUE), torch.nan, dtype=dtype, device=DEVICE)
    calls = [
        (q_THD[..., :QUERY], w_uk_HPL, out_THC[..., :LATENT]),
        (attended_THL, w_uv_HLV, out_THV[:num_tokens]),
    ]
    for x_THI, weight_HIO, out_THO in calls:
        product()(x_THI.transpose(0, 1), weight_HIO, out_THO.transpose(0, 1))
        expected_THO = torch.einsum("thi,hio->tho", x_THI.double(), weight_HIO.double())
        rounding = 2**-8 if dtype is torch.bfloat16 else 2**-11
        torch.testing.assert_close(out_THO.double(), expected_THO, rtol=rounding, atol=1e-3)
    assert out_THC[..., LATENT:].isnan().all()
    assert out_THV[num_tokens:].isnan().all()


@pytest.mark.parametrize("num_heads", [V2_LITE_HEADS, V3_HEADS])
@pytest.mark.parametrize("num_tokens", [1, 8, 32])
def test_a_captured_chain_of_products_gives_the_bits_of_one_by_one(
    num_tokens: int, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each product reads the output of the one before it, while its own weights are being loaded."""
    weights = [weights_of(num_heads, seed=seed) for seed in range(3)]
    multiply = product()
    x_THP = random(num_tokens, num_heads, QUERY)

    def chain() -> Tensor:
        values_THV = x_THP
        for w_uk_HPL, w_uv_HLV in weights * 3:
            q_THC = x_THP.new_empty(num_tokens, num_heads, CHANNELS)
            multiply(values_THV.transpose(0, 1), w_uk_HPL, q_THC[..., :LATENT].transpose(0, 1))
            values_THV = x_THP.new_empty(num_tokens, num_heads, VALUE)
            multiply(q_THC[..., :LATENT].transpose(0, 1), w_uv_HLV, values_THV.transpose(0, 1))
        return values_THV

    graph, out_THV = captured(chain)
    monkeypatch.setattr(launch, "_can_overlap", lambda device: False)
    for seed in range(20):
        x_THP.copy_(random(num_tokens, num_heads, QUERY, seed=seed + 1))
        expected_THV = chain()
        graph.replay()
        assert torch.equal(out_THV, expected_THV)
    assert bool(out_THV.isfinite().all())
    assert bool(out_THV.any())


class Layers:
    """Attention of several layers, each after the projection of a library, over caches full of latents."""

    def __init__(self, num_tokens: int, block_size: int) -> None:
        blocks = -(-KEYS // block_size)
        needs = AttentionNeeds(
            KVKind.MLA, "cuda", "bfloat16", CHANNELS, block_size, KVCacheLayout.LBNC,
            num_heads=V2_LITE_HEADS, mla=DIMS, max_num_reqs=num_tokens, max_model_len=KEYS,
        )  # fmt: skip
        backend = TritonMLA(needs, probe_platform("cuda"), context_workspace_tokens=64)
        assert isinstance(backend, MLABackend)
        spec = KVCacheSpec(KVKind.MLA, LAYERS, 1, CHANNELS, "bfloat16")
        self.cache = PagedKVCache(spec, KVCacheShape(KVCacheLayout.LBNC, block_size, num_tokens * blocks), DEVICE)
        self.cache.view.normal_(generator=torch.Generator(DEVICE).manual_seed(3))
        common, positions_T = build_common_metadata(
            query_lens=[1] * num_tokens,
            context_lens=[(row * 331 + KEYS - 1) % KEYS for row in range(num_tokens)],
            block_tables=[list(range(row * blocks, (row + 1) * blocks)) for row in range(num_tokens)],
            block_size=block_size,
            device=DEVICE,
        )
        self.metadata = backend.builder.build(0, common)
        angles_TP = positions_T[:, None] * 0.7 ** torch.arange(DIMS.qk_rope_head_dim // 2, device=DEVICE)
        self.rotation = Rotation(angles_TP.cos().float(), angles_TP.sin().float(), interleaved=True)
        self.norm = RMSNorm(LATENT, eps=1e-6, dtype=torch.bfloat16).to(DEVICE).requires_grad_(False)
        nn.init.ones_(self.norm.weight)
        self.layers = [self._layer(index, backend) for index in range(LAYERS)]
        width = V2_LITE_HEADS * VALUE
        outputs = V2_LITE_HEADS * (QUERY + DIMS.qk_rope_head_dim) + CHANNELS
        self.projections = [random(width, outputs, seed=index) * width**-0.5 for index in range(LAYERS)]
        self.x_TD = random(num_tokens, width)

    @staticmethod
    def _layer(index: int, backend: MLABackend) -> MLAAttention:
        projection = nn.Linear(LATENT, V2_LITE_HEADS * (QUERY + VALUE), bias=False).to(DEVICE, torch.bfloat16)
        layer = MLAAttention(
            num_heads=V2_LITE_HEADS,
            qk_nope_head_dim=QUERY,
            qk_rope_head_dim=DIMS.qk_rope_head_dim,
            v_head_dim=VALUE,
            kv_lora_rank=LATENT,
            scale=(QUERY + DIMS.qk_rope_head_dim) ** -0.5,
            layer_index=index,
            kv_b_proj=projection.requires_grad_(False),
            backend=backend,
        )
        layer.process_weights_after_loading()
        layer.multiply_heads = product()
        return layer

    def run(self) -> Tensor:
        x_TD = self.x_TD
        for layer, projection in zip(self.layers, self.projections, strict=True):
            q_TX, latent_TC = (x_TD @ projection).split([projection.shape[1] - CHANNELS, CHANNELS], dim=1)
            q_THD = q_TX.unflatten(1, (V2_LITE_HEADS, -1))
            out_THV = layer.rotate_and_attend(
                q_THD, latent_TC, self.rotation, self.cache, self.metadata, norm=self.norm
            )
            x_TD = rms_norm(out_THV.flatten(1), (out_THV.shape[1] * VALUE,))
        return x_TD


@pytest.mark.parametrize("block_size", [64, 16, 48])  # of 48: the kernel for any GPU
@pytest.mark.parametrize("num_tokens", [1, 4, 20])
def test_captured_attention_whose_kernels_overlap_gives_the_same_bits(
    num_tokens: int, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode reads the latent that was written, and the query that was multiplied, just before it."""
    layers = Layers(num_tokens, block_size)
    overlapping, out_TD = captured(layers.run)
    monkeypatch.setattr(launch, "_can_overlap", lambda device: False)
    one_by_one, expected_TD = captured(layers.run)
    for seed in range(30):
        layers.x_TD.copy_(random(*layers.x_TD.shape, seed=seed + 1))
        overlapping.replay()
        actual_TD = out_TD.clone()
        one_by_one.replay()
        assert torch.equal(actual_TD, expected_TD), seed
    for layer in layers.layers:
        layer.multiply_heads = library_heads_product
    assert relative_error(actual_TD, layers.run().double()) < 0.03
