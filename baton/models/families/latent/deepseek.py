"""DeepSeek V2, V3 and V3.2, and GLM-5: latent attention, which is sparse in the last two, and a mixture of experts
after the first dense layers.

Shapes: T token, D hidden channel, H head, N channel without position, R rotary channel, C latent channel, V value
channel.
"""

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend, MLAMetadata
from attention.metadata import AttentionMetadata
from attention.mla import MLAAttention
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import MLAConfig, ModelConfig
from baton.models.config.mtp import mtp_config
from baton.models.kernels.quantized.rows import RowFormat
from baton.models.layers.causal_lm import CausalLM, DecoderLayer
from baton.models.layers.indexer import Indexer, Selection
from baton.models.layers.linear import FusedLinear, Linear
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.moe.moe import MoE
from baton.models.layers.norms import RMSNorm
from baton.models.layers.row_reader import RowReader

# NOTE: the norms of the two latents use this instead of `rms_norm_eps`, as in training.
_LATENT_NORM_EPS = 1e-6


class DeepseekAttention(nn.Module, RowReader):
    def __init__(
        self,
        hidden_size: int,
        mla: MLAConfig,
        *,
        scale: float,
        layer_index: int,
        backend: AttentionBackend,
        dtype: torch.dtype,
        selection: Selection,
    ) -> None:
        super().__init__()
        self.selection = selection
        self.indexer: Indexer | None = None
        if mla.index is not None and mla.index.layers[layer_index]:
            assert mla.q_lora_rank is not None
            self.indexer = Indexer(
                hidden_size, mla.q_lora_rank, mla.index, layer_index=layer_index, backend=backend, dtype=dtype
            )
        self.qk_head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        q_size = mla.num_heads * self.qk_head_dim
        latent_part = ("kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim)
        if mla.q_lora_rank is None:
            self.q_and_latent_proj = FusedLinear(hidden_size, (("q_proj", q_size), latent_part), dtype=dtype)
            self.q_a_layernorm = self.q_b_proj = None
        else:
            q_part = ("q_a_proj", mla.q_lora_rank)
            self.q_and_latent_proj = FusedLinear(hidden_size, (q_part, latent_part), dtype=dtype)
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, eps=_LATENT_NORM_EPS, dtype=dtype)
            self.q_b_proj = Linear(mla.q_lora_rank, q_size, dtype=dtype)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, eps=_LATENT_NORM_EPS, dtype=dtype)
        self.kv_b_proj = Linear(mla.kv_lora_rank, mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), dtype=dtype)
        self.o_proj = Linear(mla.num_heads * mla.v_head_dim, hidden_size, dtype=dtype)
        self.attend = MLAAttention(
            num_heads=mla.num_heads,
            qk_nope_head_dim=mla.qk_nope_head_dim,
            qk_rope_head_dim=mla.qk_rope_head_dim,
            v_head_dim=mla.v_head_dim,
            kv_lora_rank=mla.kv_lora_rank,
            scale=scale,
            layer_index=layer_index,
            kv_b_proj=self.kv_b_proj,
            backend=backend,
            latent_multiplier=mla.latent_multiplier,
        )

    def forward(self, x_TD: Tensor, rotation: Rotation, kv_cache: PagedKVCache, metadata: AttentionMetadata) -> Tensor:
        assert isinstance(metadata, MLAMetadata)
        sizes = [size for _, size in self.q_and_latent_proj.parts]
        q_TX, latent_TC = self.q_and_latent_proj(x_TD).split(sizes, dim=-1)
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            reader = self.q_b_proj if self.indexer is None else None
            q_a = self.q_a_layernorm.add_and_norm_for(reader, q_TX, None)
            q_TX = self.q_b_proj(q_a)
            if self.indexer is not None:
                self.selection.keys = self.indexer(x_TD, q_a, rotation, kv_cache, metadata)
        q_THD = q_TX.unflatten(-1, (-1, self.qk_head_dim))
        out_THV = self.attend.rotate_and_attend(
            q_THD,
            latent_TC,
            rotation,
            kv_cache,
            metadata,
            norm=self.kv_a_layernorm,
            selected=self.selection.keys,
        )
        out_TD: Tensor = self.o_proj(out_THV.flatten(1))
        return out_TD

    def row_format(self, num_tokens: int) -> RowFormat | None:
        """Returns None with an indexer, which reads the input too."""
        return self.q_and_latent_proj.row_format(num_tokens) if self.indexer is None else None


class DeepseekLayer(DecoderLayer):
    def __init__(
        self,
        config: ModelConfig,
        mla: MLAConfig,
        *,
        layer_index: int,
        backend: AttentionBackend,
        dtype: torch.dtype,
        selection: Selection,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.self_attn = DeepseekAttention(
            size,
            mla,
            scale=config.attention_scale,
            layer_index=layer_index,
            backend=backend,
            dtype=dtype,
            selection=selection,
        )
        self.post_attention_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        if config.moe is not None and config.moe.layers[layer_index]:
            self.mlp = MoE(size, config.moe, dtype=dtype)
        else:
            self.mlp = GatedMLP(size, config.intermediate_size, dtype=dtype, bias=config.mlp_bias)


class DeepseekForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        mla = config.attention
        assert isinstance(mla, MLAConfig)
        selection = Selection()
        layers = [
            DeepseekLayer(config, mla, layer_index=index, backend=backend, dtype=dtype, selection=selection)
            for index in range(config.num_layers)
        ]
        mtp_layer = None
        if config.drafts:
            own = mtp_config(config)
            assert isinstance(own.attention, MLAConfig)
            mtp_layer = DeepseekLayer(
                own, own.attention, layer_index=0, backend=backend, dtype=dtype, selection=Selection()
            )
        super().__init__(config, layers, dtype=dtype, mtp_layer=mtp_layer)
