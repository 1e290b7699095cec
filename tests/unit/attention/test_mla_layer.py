"""The latent layer's own work: memory that the caller owns, padding, caches in 8 bits, wide values.

`tests.conformance.attention` tests its results in every backend, layout and dtype.
"""

import pytest
import torch
from torch import Tensor, nn

from attention.backend import AttentionNeeds, MLABackend, MLADims, RaggedLens
from attention.backends.torch_mla import TorchMLA
from attention.backends.triton_mla import TritonMLA
from attention.metadata import CommonAttentionMetadata, build_common_metadata
from attention.mla import MLAAttention
from attention.platform import probe_platform
from baton.core.errors import InternalError
from baton.kvcache.cache import TORCH_DTYPES, PagedKVCache
from baton.kvcache.fp8 import dequantize, quantize
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.scales import KVScales
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from tests.device import DEVICE

DIMS = MLADims(qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, kv_lora_rank=12)
HEADS, BLOCK_SIZE, SCALE = 3, 4, 0.4
CHANNELS = DIMS.kv_lora_rank + DIMS.qk_rope_head_dim
QUERY_DIM = DIMS.qk_nope_head_dim + DIMS.qk_rope_head_dim
# A decode, a prefill with context between two without, and a long one.
SIZES = [(1, 9), (3, 0), (4, 7), (2, 0), (3, 20)]
BACKENDS: list[type[TorchMLA] | type[TritonMLA]] = [TritonMLA] if DEVICE == "cuda" else [TorchMLA, TritonMLA]
by_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.capabilities.name)


class WideValues(TorchMLA):
    """A backend whose prefills want values as wide as keys."""

    pads_v = True

    def attend(
        self,
        q_THD: Tensor,
        k_SHD: Tensor,
        v_SHV: Tensor,
        *,
        lens: RaggedLens,
        causal: bool,
        scale: float,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert v_SHV.shape[-1] == k_SHD.shape[-1]
        assert out is None
        return super().attend(q_THD, k_SHD, v_SHV, lens=lens, causal=causal, scale=scale)


class Counting(TorchMLA):
    """Counts the pairs of a query and a key that its prefills see."""

    pairs = 0

    def attend(
        self,
        q_THD: Tensor,
        k_SHD: Tensor,
        v_SHV: Tensor,
        *,
        lens: RaggedLens,
        causal: bool,
        scale: float,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        num_queries = lens.query_start_loc.diff().tolist()
        num_keys = lens.key_start_loc.diff().tolist()
        self.pairs += sum(queries * keys for queries, keys in zip(num_queries, num_keys, strict=True))
        return super().attend(q_THD, k_SHD, v_SHV, lens=lens, causal=causal, scale=scale, out=out)


class Step:
    """One layer and one batch over a poisoned cache in which the context's latents lie."""

    def __init__(
        self,
        backend: type[TorchMLA] | type[TritonMLA],
        *,
        dtype: str = "float32",
        kv_dtype: str = "",
        scales: KVScales | None = None,
        workspace_tokens: int = 8,
        device: str = DEVICE,
    ) -> None:
        torch.manual_seed(0)
        needs = AttentionNeeds(
            KVKind.MLA, device, dtype, CHANNELS, BLOCK_SIZE, KVCacheLayout.LBNC, kv_dtype=kv_dtype, num_heads=HEADS,
            max_num_reqs=8, max_model_len=64, mla=DIMS,
        )  # fmt: skip
        self.backend: MLABackend = backend(needs, probe_platform(device), context_workspace_tokens=workspace_tokens)
        kind = TORCH_DTYPES[dtype]
        projection = nn.Linear(DIMS.kv_lora_rank, HEADS * (DIMS.qk_nope_head_dim + DIMS.v_head_dim), bias=False)
        self.layer = MLAAttention(
            num_heads=HEADS,
            qk_nope_head_dim=DIMS.qk_nope_head_dim,
            qk_rope_head_dim=DIMS.qk_rope_head_dim,
            v_head_dim=DIMS.v_head_dim,
            kv_lora_rank=DIMS.kv_lora_rank,
            scale=SCALE,
            layer_index=0,
            kv_b_proj=projection.to(device, kind).requires_grad_(requires_grad=False),
            backend=self.backend,
            scales=scales,
        ).to(device)
        self.layer.process_weights_after_loading()
        blocks_of = [-(-sum(size) // BLOCK_SIZE) for size in SIZES]
        tables = [list(part) for part in torch.randperm(sum(blocks_of)).split(blocks_of)]
        spec = KVCacheSpec(KVKind.MLA, 1, 1, CHANNELS, needs.cache_dtype)
        self.cache = PagedKVCache(spec, KVCacheShape(needs.layout, BLOCK_SIZE, sum(blocks_of)), device)
        self.cache.storage.copy_(torch.full(self.cache.storage.shape, torch.nan))
        self.common: CommonAttentionMetadata = build_common_metadata(
            query_lens=[size[0] for size in SIZES],
            context_lens=[size[1] for size in SIZES],
            block_tables=[[int(block) for block in table] for table in tables],
            block_size=BLOCK_SIZE,
            device=device,
        )[0]
        # Numbers that the cache holds exactly, so that its rounding is no error of the layer.
        scale = torch.tensor(0.0625) if scales is None else scales.k_scale.cpu()
        self.latents = [
            dequantize(quantize(torch.randn(sum(size), CHANNELS), scale, TORCH_DTYPES[needs.cache_dtype]), scale, kind)
            for size in SIZES
        ]
        layer_BNC = self.cache.layer(0)[0, :, :, 0]
        for latents_SC, table, (_, context_len) in zip(self.latents, tables, SIZES, strict=True):
            for position in range(context_len):
                stored = quantize(latents_SC[position], scale, layer_BNC.dtype)
                layer_BNC[int(table[position // BLOCK_SIZE]), position % BLOCK_SIZE] = stored.to(device)
        self.q_THD = torch.randn(sum(size[0] for size in SIZES), HEADS, QUERY_DIM).to(device, kind)
        self.new_TC = torch.cat([latents[size[1] :] for latents, size in zip(self.latents, SIZES, strict=True)]).to(
            device
        )

    def run(self, *, padding: int = 0, out: Tensor | None = None) -> Tensor:
        rank = DIMS.kv_lora_rank
        q = nn.functional.pad(self.q_THD, (0, 0, 0, 0, 0, padding), value=torch.nan)
        new = nn.functional.pad(self.new_TC, (0, 0, 0, padding), value=torch.nan)
        metadata = self.backend.builder.build(0, self.common)
        result: Tensor = self.layer(q, new[:, :rank], new[:, rank:], self.cache, metadata, out=out)
        return result

    def expected(self) -> Tensor:
        weight = self.layer.kv_b_proj.weight.double().cpu()
        rank, nope = DIMS.kv_lora_rank, DIMS.qk_nope_head_dim
        rows, row = [], 0
        for latents_SC, (query_len, context_len) in zip(self.latents, SIZES, strict=True):
            latents = latents_SC.double()
            kv_SHX = (latents[:, :rank] @ weight.T).view(len(latents), HEADS, -1)
            k_SHD = torch.cat((kv_SHX[..., :nope], latents[:, None, rank:].expand(-1, HEADS, -1)), dim=-1)
            for position in range(context_len, context_len + query_len):
                q_HD = self.q_THD[row].double().cpu()
                scores_HS = torch.einsum("hd,shd->hs", q_HD, k_SHD[: position + 1]) * SCALE
                rows.append(torch.einsum("hs,shv->hv", scores_HS.softmax(-1), kv_SHX[: position + 1, :, nope:]))
                row += 1
        return torch.stack(rows)

    def check(self, out: Tensor, tolerance: float = 2e-5) -> None:
        expected = self.expected()
        assert (out.double().cpu() - expected).norm() <= tolerance * expected.norm()


@by_backend
def test_the_result_comes_in_the_callers_memory_and_padding_stays(backend: type[TorchMLA] | type[TritonMLA]) -> None:
    step = Step(backend)
    num_tokens = len(step.q_THD)
    wide = torch.full((num_tokens + 2, HEADS, DIMS.v_head_dim + 3), 7.0, device=DEVICE)
    out = wide[..., : DIMS.v_head_dim]
    assert step.run(padding=2, out=out) is out
    step.check(out[:num_tokens])
    assert (wide[num_tokens:] == 7.0).all()
    assert (wide[..., DIMS.v_head_dim :] == 7.0).all()


@pytest.mark.parametrize("shape", [(13, HEADS, 4), (12, HEADS, 5), (13, 5, HEADS)])
def test_memory_that_cannot_take_the_result_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InternalError, match="got an output of"):
        Step(BACKENDS[0]).run(out=torch.empty(shape, device=DEVICE))


@by_backend
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_latent_cache_in_8_bits_has_one_scale(backend: type[TorchMLA] | type[TritonMLA], kv_dtype: str) -> None:
    step = Step(backend, kv_dtype=kv_dtype, scales=KVScales(k_scale=0.0625))
    step.check(step.run())


@by_backend
def test_scales_can_come_from_the_first_batch(backend: type[TorchMLA] | type[TritonMLA]) -> None:
    scales = KVScales(calculate=True)
    step = Step(backend, scales=scales)
    step.check(step.run(padding=2)[:-2])
    assert not scales.calculate
    torch.testing.assert_close(scales.k_scale, step.new_TC.abs().amax() / 200.0)


def test_values_are_padded_for_a_backend_that_wants_them_as_wide_as_keys() -> None:
    step = Step(WideValues, device="cpu")
    step.check(step.run())


@pytest.mark.parametrize("workspace_tokens", [1, 8, 64])
def test_every_prefill_sees_each_of_its_keys_once(workspace_tokens: int) -> None:
    step = Step(Counting, workspace_tokens=workspace_tokens, device="cpu")
    step.check(step.run())
    assert isinstance(step.backend, Counting)
    assert step.backend.pairs == sum(new * (new + context) for new, context in SIZES if new > 1)
