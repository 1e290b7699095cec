"""Multi-head latent attention of one layer: what every MLA backend shares.

The cache holds one latent and one rotary key per token, for all heads. Decodes stay in the latent space: W_UK is
absorbed into the query and W_UV applied to the result, so that a token's latent is read once for all heads. Prefills
are bound by arithmetic instead, so keys and values are decompressed: those of the new tokens at once, those of the
context chunk by chunk in a fixed workspace, merged by log-sum-exp.

Legend: T tokens, S keys, H heads, P query channels without position, R rotary channels, L latent rank, V value
channels.
"""

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend, ContextChunk, MLABackend, MLAMetadata
from attention.cache import PagedKVCache
from attention.cache_ops import gather_tokens, store_latent
from attention.lse import merge_attn_states
from attention.parameters import AttentionParameters
from baton.errors import ConfigError


class MLAAttention(nn.Module):
    """Args:
        scale: what scores are multiplied by.
        kv_b_proj: latent to each head's key part and value, [L] -> [H * (P + V)]; shared with the model, not owned.

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
        self.parameters_of_decodes = AttentionParameters(scale=scale)
        self.scale = scale
        self.layer_index = layer_index
        self.kv_b_proj = kv_b_proj
        self.backend = backend
        self._w_uk_HPL: Tensor | None = None
        self._w_uv_HLV: Tensor | None = None

    def process_weights_after_loading(self) -> None:
        """Takes W_UK and W_UV out of kv_b_proj: views of its weights, so call again if these move to another place."""
        weight_HXL = self.kv_b_proj.weight.detach().view(self.num_heads, -1, self.kv_lora_rank)
        self._w_uk_HPL = weight_HXL[:, : self.qk_nope_head_dim]
        self._w_uv_HLV = weight_HXL[:, self.qk_nope_head_dim :].transpose(1, 2)

    def forward(
        self, q_THD: Tensor, kv_c_TL: Tensor, k_pe_TR: Tensor, kv_cache: PagedKVCache, metadata: MLAMetadata
    ) -> Tensor:
        """[T, H, V]; rows past the batch's actual tokens hold anything.

        Args:
            q_THD: each head's channels without position, then the rotary ones, rotated.
            kv_c_TL: normalised latents.
            k_pe_TR: rotary keys, rotated.
        """
        kv_layer = kv_cache.layer(self.layer_index)
        store_latent(kv_layer, kv_c_TL, k_pe_TR, metadata.new_tokens)
        out_THV = q_THD.new_empty(q_THD.shape[0], self.num_heads, self.v_head_dim)
        decodes = slice(0, metadata.num_decode_tokens)
        prefills = slice(metadata.num_decode_tokens, metadata.num_actual_tokens)
        if decodes.stop:
            self._decode(q_THD[decodes], kv_layer, metadata, out_THV[decodes])
        if metadata.prefill is not None:
            out_THV[prefills] = self._prefill(q_THD[prefills], kv_c_TL[prefills], k_pe_TR[prefills], kv_layer, metadata)
        return out_THV

    def _decode(self, q_THD: Tensor, kv_layer: Tensor, metadata: MLAMetadata, out_THV: Tensor) -> None:
        assert self._w_uk_HPL is not None, "process_weights_after_loading was not called"
        assert self._w_uv_HLV is not None
        q_nope_THP, q_pe_THR = q_THD[..., : self.qk_nope_head_dim], q_THD[..., self.qk_nope_head_dim :]
        q_latent_THL = torch.bmm(q_nope_THP.transpose(0, 1), self._w_uk_HPL).transpose(0, 1)
        attended_THL = torch.empty_like(q_latent_THL, memory_format=torch.contiguous_format)
        self.backend.forward(
            torch.cat((q_latent_THL, q_pe_THR), dim=-1),
            None,
            None,
            kv_layer,
            metadata,
            layer=self.parameters_of_decodes,
            out=attended_THL,
        )
        out_THV.copy_(torch.bmm(attended_THL.transpose(0, 1), self._w_uv_HLV).transpose(0, 1))

    def _prefill(
        self, q_THD: Tensor, kv_c_TL: Tensor, k_pe_TR: Tensor, kv_layer: Tensor, metadata: MLAMetadata
    ) -> Tensor:
        assert metadata.prefill is not None
        k_THD, v_THV = self._decompress(kv_c_TL, k_pe_TR)
        out_THV, lse_HT = self.backend.attend(q_THD, k_THD, v_THV, lens=metadata.prefill, causal=True, scale=self.scale)
        for chunk in metadata.context_chunks:
            queries = slice(chunk.query_start, chunk.query_stop)
            context_out_THV, context_lse_HT = self._attend_context(q_THD[queries], kv_layer, chunk)
            out_THV[queries], lse_HT[:, queries] = merge_attn_states(
                context_out_THV, context_lse_HT, out_THV[queries], lse_HT[:, queries]
            )
        return out_THV

    def _attend_context(self, q_THD: Tensor, kv_layer: Tensor, chunk: ContextChunk) -> tuple[Tensor, Tensor]:
        latents_SC = self.backend.workspace[: chunk.num_tokens]
        gather_tokens(kv_layer, chunk.tokens, out=latents_SC)
        k_SHD, v_SHV = self._decompress(latents_SC[:, : self.kv_lora_rank], latents_SC[:, self.kv_lora_rank :])
        return self.backend.attend(q_THD, k_SHD, v_SHV, lens=chunk.lens, causal=False, scale=self.scale)

    def _decompress(self, kv_c_SL: Tensor, k_pe_SR: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [S, H, P + R] and values [S, H, V] of latents."""
        kv_SHX: Tensor = self.kv_b_proj(kv_c_SL).view(kv_c_SL.shape[0], self.num_heads, -1)
        k_nope_SHP, v_SHV = kv_SHX[..., : self.qk_nope_head_dim], kv_SHX[..., self.qk_nope_head_dim :]
        k_pe_SHR = k_pe_SR.unsqueeze(1).expand(-1, self.num_heads, -1)
        return torch.cat((k_nope_SHP, k_pe_SHR), dim=-1), v_SHV
