"""Multi-head latent attention of one layer, for every MLA backend.

The cache holds one latent and one rotary key per token, for all heads. Decodes stay in the latent space: W_UK is
absorbed into the query and W_UV applied to the result, so that a token's latent is read once for all heads. Prefills
are bound by arithmetic instead, so they decompress keys and values (`attention.mla_decompressed`). Prefills stay in the
latent space too where each query has its own set of keys (sparse attention), and where a token has the same bits as a
decode and in a prompt.

Legend: T tokens, S keys, H heads, P query channels without position, R rotary channels, D = P + R, L latent rank,
C = L + R, V value channels, X = P + V.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend, MLABackend, MLAMetadata, SparseMLABackend
from attention.kernels.rotary.latents import rotate_latents
from attention.metadata import AttentionMetadata
from attention.mla_decompressed import DecompressedPrefills
from attention.parameters import AttentionParameters
from attention.rotation import Rotation, RowNorm
from attention.sparse import NOTHING_SELECTED, Selected, SparseQueries
from baton.core.errors import ConfigError, InternalError
from baton.kvcache.access import store_latent
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.scales import KVScales

# x, weight, out: x [H, T, I] @ weight [H, I, O] into out [H, T, O], each at any strides
MultiplyHeads: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]

# Number of prefill queries in the latent space at once: 128 heads of 1,024 tokens and their results take 285 MB.
_LATENT_QUERIES = 1024


class MLAAttention(nn.Module):
    """Latent attention of one layer.

    Args:
        scale: factor of the scores.
        kv_b_proj: projection from the latent to each head's key part and value, [L] -> [H * (P + V)]; the model owns
            it.
        scales: of an fp8 cache; its `k_scale` is the latents' scale.
        latent_multiplier: factor of latents after their norm in `rotate_and_attend`.

    Attributes:
        multiply_heads: computes the products of absorbed decodes. Replace it by a function that is faster for few rows,
            or whose results do not depend on the batch.

    Raises:
        ConfigError: the backend is for another kind of cache.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        kv_lora_rank: int,
        scale: float,
        layer_index: int,
        kv_b_proj: nn.Linear,
        backend: AttentionBackend,
        scales: KVScales | None = None,
        latent_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        if not isinstance(backend, MLABackend):
            raise ConfigError(
                f"{backend.capabilities.name} reads caches of kind {backend.capabilities.kind}, not latent ones",
                field="attention_backend",
                value=backend.capabilities.name,
                cure="let the backend be selected for this model",
            )
        self.num_heads = num_heads
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.kv_lora_rank = kv_lora_rank
        self.scale = scale
        self.scales = scales
        self.asked = AttentionParameters(scale=scale, scales=scales)
        self.layer_index = layer_index
        self.latent_multiplier = latent_multiplier
        self.kv_b_proj = kv_b_proj
        self.backend = backend
        self._decompressing = DecompressedPrefills(
            backend, num_heads, qk_nope_head_dim, kv_lora_rank, v_head_dim, scale
        )
        self.sparse_backend = backend if isinstance(backend, SparseMLABackend) else None
        self.multiply_heads: MultiplyHeads = library_heads_product
        self._w_uk_HPL: Tensor | None = None
        self._w_uv_HLV: Tensor | None = None

    def use_scales(self, scales: KVScales) -> None:
        """Sets the scales of an fp8 cache, for a model that is built before its cache's dtype is known."""
        self.scales = scales
        self.asked = AttentionParameters(scale=self.scale, scales=scales)

    def process_weights_after_loading(self) -> None:
        """Makes W_UK and W_UV views of kv_b_proj's weights. Call it again if these weights move."""
        weight_HXL = self.kv_b_proj.weight.detach().view(self.num_heads, -1, self.kv_lora_rank)
        self._w_uk_HPL = weight_HXL[:, : self.qk_nope_head_dim]
        self._w_uv_HLV = weight_HXL[:, self.qk_nope_head_dim :].transpose(1, 2)

    def forward(
        self,
        q_THD: Tensor,
        kv_c_TL: Tensor,
        k_pe_TR: Tensor,
        kv_cache: PagedKVCache,
        metadata: MLAMetadata,
        *,
        selected: Selected = NOTHING_SELECTED,
        out: Tensor | None = None,
    ) -> Tensor:
        """Returns [T, H, V]; rows past the batch's actual tokens are undefined.

        Args:
            q_THD: each head's channels without position, then the rotary ones, rotated.
            kv_c_TL: normalised latents.
            k_pe_TR: rotary keys, rotated.
            selected: the selected tokens, with sparse attention.
            out: memory for the result, of the queries' dtype, channels adjacent; None: new memory.

        Raises:
            InternalError: `out` cannot take the result.
        """
        kv_layer = kv_cache.layer(self.layer_index)
        self._calculate_scales(q_THD, kv_c_TL, k_pe_TR, metadata)
        store_latent(kv_layer, kv_c_TL, k_pe_TR, metadata.new_tokens, scale=self._latent_scale)
        out_THV = self._checked(out, q_THD)
        return self._attend_stored(q_THD, kv_c_TL, k_pe_TR, kv_layer, metadata, selected=selected, out_THV=out_THV)

    def rotate_and_attend(
        self,
        q_THD: Tensor,
        latent_TC: Tensor,
        rotation: Rotation,
        kv_cache: PagedKVCache,
        metadata: MLAMetadata,
        *,
        norm: RowNorm,
        selected: Selected = NOTHING_SELECTED,
    ) -> Tensor:
        """Norms latents, turns queries and latents, writes latents to the cache, and attends. On a GPU one kernel does
        everything before the attention.

        Args:
            q_THD: each head's channels without position, then the rotary ones.
            latent_TC: each token's latent, then its rotary key. Both arguments are overwritten.
            norm: the norm of the latents.
            selected: as in `forward`.
        """
        kv_c_TL, k_pe_TR = latent_TC.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        if not q_THD.is_cuda:
            q_nope_THP, q_pe_THR = q_THD.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
            # The key's rotary part turns as one more head, so one rotation serves queries and key.
            pe_TXR = rotation.apply(torch.cat((q_pe_THR, k_pe_TR.unsqueeze(1)), dim=1))
            q_THD, kv_c_TL = torch.cat((q_nope_THP, pe_TXR[:, :-1]), dim=-1), norm(kv_c_TL)
            if self.latent_multiplier != 1.0:
                kv_c_TL = kv_c_TL * self.latent_multiplier
            return self.forward(q_THD, kv_c_TL, pe_TXR[:, -1], kv_cache, metadata, selected=selected)
        if self.scales is not None and self.scales.calculate:  # from normed, unstored latents
            rotate_latents(q_THD, latent_TC, rotation, norm=norm, multiplier=self.latent_multiplier)
            return self.forward(q_THD, kv_c_TL, k_pe_TR, kv_cache, metadata, selected=selected)
        kv_layer = kv_cache.layer(self.layer_index)
        # Prompts among the decode tokens need their queries turned in place.
        apart = metadata.num_decode_tokens > 0 and metadata.prefill_base is None
        decode_q_THC = self._new_decode_queries(q_THD, metadata) if apart else None
        rotate_latents(
            q_THD,
            latent_TC,
            rotation,
            norm=norm,
            multiplier=self.latent_multiplier,
            decode_q_THC=decode_q_THC,
            kv_layer=kv_layer,
            slot_mapping=metadata.new_tokens.slot_mapping,
            scale=self._latent_scale,
        )
        out_THV = self._checked(None, q_THD)
        return self._attend_stored(
            q_THD,
            kv_c_TL,
            k_pe_TR,
            kv_layer,
            metadata,
            selected=selected,
            decode_q_THC=decode_q_THC,
            out_THV=out_THV,
        )

    def _attend_stored(
        self,
        q_THD: Tensor,
        kv_c_TL: Tensor,
        k_pe_TR: Tensor,
        kv_layer: Tensor,
        metadata: MLAMetadata,
        *,
        selected: Selected,
        out_THV: Tensor,
        decode_q_THC: Tensor | None = None,
    ) -> Tensor:
        """Attends after the batch's latents are in the cache.

        Args:
            decode_q_THC: memory for the decodes' queries that already has the rotary part; None: the rotary part is in
                `q_THD`.
        """
        decodes, base = slice(0, metadata.num_decode_tokens), metadata.prefill_base
        prefills = slice(metadata.num_decode_tokens if base is None else base, metadata.num_actual_tokens)
        if decodes.stop:
            if decode_q_THC is None:
                decode_q_THC = self._new_decode_queries(q_THD, metadata)
                decode_q_THC[..., self.kv_lora_rank :] = q_THD[decodes, :, self.qk_nope_head_dim :]
            attend = partial(self._attend_all, kv_layer, metadata)
            if selected.decodes is not None:
                assert metadata.sparse_decodes is not None
                attend = partial(self._attend_selected, kv_layer, selected.decodes, metadata.sparse_decodes)
            self._absorbed(q_THD[decodes, :, : self.qk_nope_head_dim], decode_q_THC, attend, out_THV[decodes])
        if metadata.prefill is not None and selected.prefills is not None:
            assert metadata.sparse_prefills is not None
            self._prefill_selected(
                q_THD[prefills], kv_layer, selected.prefills, metadata.sparse_prefills, out_THV[prefills]
            )
        elif metadata.absorbed_prefills:
            for run in metadata.absorbed_prefills:
                rows = slice(prefills.start + run.start, prefills.start + run.stop)
                attend = partial(self._attend_all, kv_layer, run.metadata)
                self._absorbed_prefill(q_THD[rows], attend, out_THV[rows])
        elif metadata.prefill is not None:
            self._decompressing.attend(
                q_THD[prefills],
                kv_c_TL[prefills],
                k_pe_TR[prefills],
                kv_layer,
                metadata.prefill,
                metadata.context_chunks,
                project=self.kv_b_proj,
                latent_scale=self._latent_scale,
                out_THV=out_THV[prefills],
            )
        return out_THV

    def _new_decode_queries(self, q_THD: Tensor, metadata: MLAMetadata) -> Tensor:
        """Allocates [T, H, C] for the decodes' queries in the latent space."""
        channels = self.kv_lora_rank + self.qk_rope_head_dim
        return q_THD.new_empty(metadata.num_decode_tokens, self.num_heads, channels)

    def _absorbed(
        self, q_nope_THP: Tensor, q_THC: Tensor, attend: Callable[[Tensor, Tensor], None], out_THV: Tensor
    ) -> None:
        """Attends with every head's query directly to the latents: q.(W_UK c) is (q W_UK).c, and the weighted sum of
        W_UV c is W_UV times the weighted sum of c.

        Args:
            q_THC: memory for the queries in the latent space; so far it has only the rotary part.
            attend: takes the queries and memory for the weighted sums of latents.
        """
        assert self._w_uk_HPL is not None, "process_weights_after_loading was not called"
        assert self._w_uv_HLV is not None
        rank = self.kv_lora_rank
        self.multiply_heads(q_nope_THP.transpose(0, 1), self._w_uk_HPL, q_THC[..., :rank].transpose(0, 1))
        attended_THL = q_THC.new_empty(*q_THC.shape[:2], rank)
        attend(q_THC, attended_THL)
        self.multiply_heads(attended_THL.transpose(0, 1), self._w_uv_HLV, out_THV.transpose(0, 1))

    def _absorbed_prefill(self, q_THD: Tensor, attend: Callable[[Tensor, Tensor], None], out_THV: Tensor) -> None:
        q_nope_THP, q_pe_THR = q_THD.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_THC = q_THD.new_empty(*q_THD.shape[:2], self.kv_lora_rank + self.qk_rope_head_dim)
        q_THC[..., self.kv_lora_rank :] = q_pe_THR
        self._absorbed(q_nope_THP, q_THC, attend, out_THV)

    def _attend_all(self, kv_layer: Tensor, metadata: AttentionMetadata, q_THC: Tensor, attended_THL: Tensor) -> None:
        self.backend.forward(q_THC, None, None, kv_layer, metadata, layer=self.asked, out=attended_THL)

    def _attend_selected(
        self, kv_layer: Tensor, slots_TK: Tensor, queries: SparseQueries, q_THC: Tensor, attended_THL: Tensor
    ) -> None:
        assert self.sparse_backend is not None, "the backend was selected without the feature sparse"
        self.sparse_backend.attend_selected(q_THC, kv_layer, slots_TK, queries, layer=self.asked, out=attended_THL)

    def _prefill_selected(
        self, q_THD: Tensor, kv_layer: Tensor, slots_TK: Tensor, queries: SparseQueries, out_THV: Tensor
    ) -> None:
        """Attends to each query's selected tokens, which may include the batch's own, in pieces of bounded memory."""
        for start, piece in queries.pieces(_LATENT_QUERIES):
            rows = slice(start, start + len(piece.counts_T))
            attend = partial(self._attend_selected, kv_layer, slots_TK[rows], piece)
            self._absorbed_prefill(q_THD[rows], attend, out_THV[rows])

    @property
    def _latent_scale(self) -> Tensor | None:
        return None if self.scales is None else self.scales.k_scale

    def _calculate_scales(self, q_THD: Tensor, kv_c_TL: Tensor, k_pe_TR: Tensor, metadata: MLAMetadata) -> None:
        """Calculates scales from the first batch if requested. Undefined padding does not count."""
        if self.scales is None or not self.scales.calculate:
            return
        actual = slice(0, metadata.num_actual_tokens)
        latents_TC = torch.cat((kv_c_TL[actual], k_pe_TR[actual]), dim=-1)
        self.scales.calc_kv_scales(q_THD[actual], latents_TC, latents_TC)

    def _checked(self, out: Tensor | None, q_THD: Tensor) -> Tensor:
        shape = (q_THD.shape[0], self.num_heads, self.v_head_dim)
        if out is None:
            return q_THD.new_empty(shape)
        if out.shape != shape or out.dtype != q_THD.dtype or out.stride(-1) != 1:
            raise InternalError(
                f"attention layer {self.layer_index} got an output of {tuple(out.shape)} in {out.dtype}",
                field="out",
                value=tuple(out.shape),
                allowed=(f"{shape} of {q_THD.dtype}, channels adjacent",),
            )
        return out


def library_heads_product(x_HTI: Tensor, weight_HIO: Tensor, out_HTO: Tensor) -> None:
    torch.bmm(x_HTI, weight_HIO, out=out_HTO)
