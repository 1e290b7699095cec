"""Prefills of multi-head latent attention with decompressed keys and values: of new tokens at once, of the context
chunk by chunk in a fixed workspace, merged by log-sum-exp. Legend as in `attention.mla`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from attention.backend import ContextChunk, MLABackend, RaggedLens
from attention.lse import merge_attn_states
from baton.kvcache.access import gather_tokens

# From latents to each head's key part and value, [S, L] -> [S, H * (P + V)]
Project: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class DecompressedPrefills:
    """One layer's attention of prefills, with `MLAAttention`'s arguments."""

    backend: MLABackend
    num_heads: int
    qk_nope_head_dim: int
    kv_lora_rank: int
    v_head_dim: int
    scale: float

    def attend(
        self,
        q_THD: Tensor,
        kv_c_TL: Tensor,
        k_pe_TR: Tensor,
        kv_layer: Tensor,
        lens: RaggedLens,
        context_chunks: tuple[ContextChunk, ...],
        *,
        project: Project,
        latent_scale: Tensor | None,
        out_THV: Tensor,
    ) -> None:
        """Attends to the new tokens, then to each chunk of context, and merges the results in place."""
        k_THD, v_THV = self._decompress(kv_c_TL, k_pe_TR, project)
        lse_HT = self._attend(q_THD, k_THD, v_THV, lens=lens, causal=True, out=out_THV)[1]
        for chunk in context_chunks:
            latents_SC = self.backend.workspace[: chunk.num_tokens]
            gather_tokens(kv_layer, chunk.tokens, out=latents_SC, scale=latent_scale)
            rank = self.kv_lora_rank
            k_SHD, v_SHV = self._decompress(latents_SC[:, :rank], latents_SC[:, rank:], project)
            queries = slice(chunk.query_start, chunk.query_stop)
            context_THV, context_lse_HT = self._attend(
                q_THD[queries], k_SHD, v_SHV, lens=chunk.lens, causal=False, out=None
            )
            own_THV, own_lse_HT = out_THV[queries], lse_HT[:, queries]
            merge_attn_states(context_THV, context_lse_HT, own_THV, own_lse_HT, out=own_THV, lse_HT=own_lse_HT)

    def _decompress(self, kv_c_SL: Tensor, k_pe_SR: Tensor, project: Project) -> tuple[Tensor, Tensor]:
        """Returns keys [S, H, D] and values [S, H, V] of latents."""
        kv_SHX = project(kv_c_SL).view(kv_c_SL.shape[0], self.num_heads, -1)
        k_nope_SHP, v_SHV = kv_SHX[..., : self.qk_nope_head_dim], kv_SHX[..., self.qk_nope_head_dim :]
        k_pe_SHR = k_pe_SR.unsqueeze(1).expand(-1, self.num_heads, -1)
        return torch.cat((k_nope_SHP, k_pe_SHR), dim=-1), v_SHV

    def _attend(
        self, q_THD: Tensor, k_SHD: Tensor, v_SHV: Tensor, *, lens: RaggedLens, causal: bool, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Runs the backend's attention over decompressed keys. If its kernel needs values as wide as keys, it pads them
        with zeros and cuts the output."""
        if not self.backend.pads_v:
            return self.backend.attend(q_THD, k_SHD, v_SHV, lens=lens, causal=causal, scale=self.scale, out=out)
        padded_SHD = pad(v_SHV, (0, k_SHD.shape[-1] - v_SHV.shape[-1]))
        attended_THD, lse_HT = self.backend.attend(q_THD, k_SHD, padded_SHD, lens=lens, causal=causal, scale=self.scale)
        attended_THV = attended_THD[..., : self.v_head_dim]
        return (attended_THV if out is None else out.copy_(attended_THV)), lse_HT
