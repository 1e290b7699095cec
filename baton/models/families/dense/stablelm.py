"""StableLM: layer norms, partial rotation of each head, and in larger models norms of heads and one norm for both
halves of a layer.

Shapes: T token, D hidden channel, X channels of all heads, H head, C head channel.
"""

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend
from attention.layer import Attention
from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.families.dense.stablelm_config import StableLMSwitches
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.linear import FusedLinear, Linear
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.norms import LayerNorm, NormOfEachHead
from baton.models.layers.parallel import ParallelModule, kv_heads, query_heads
from baton.models.layers.step_context import StepContext


class StableLMAttention(nn.Module):
    def __init__(
        self, config: ModelConfig, gqa: GQAConfig, *, layer_index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.heads = gqa.num_heads, gqa.num_kv_heads, gqa.num_kv_heads
        sizes = tuple(heads * gqa.head_dim for heads in self.heads)
        parts = tuple(zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True))
        self.qkv_proj = FusedLinear(config.hidden_size, parts, dtype=dtype, bias=gqa.qkv_bias)
        self.o_proj = Linear(sizes[0], config.hidden_size, dtype=dtype)
        self.q_layernorm = self.k_layernorm = None
        assert isinstance(config.switches, StableLMSwitches)
        if config.switches.qk_norm_heads is not None:
            queries, keys = config.switches.qk_norm_heads
            size, eps = gqa.head_dim, config.norm_eps
            self.q_layernorm = NormOfEachHead(queries, size, held=query_heads, eps=eps, dtype=dtype)
            self.k_layernorm = NormOfEachHead(keys, size, held=kv_heads, eps=eps, dtype=dtype)
        self.attend = Attention(
            num_heads=gqa.num_heads,
            num_kv_heads=gqa.num_kv_heads,
            head_dim=gqa.head_dim,
            scale=gqa.scale,
            layer_index=layer_index,
            backend=backend,
        )

    def forward(self, x_TD: Tensor, rotation: Rotation, kv_cache: PagedKVCache, metadata: AttentionMetadata) -> Tensor:
        qkv_TX = self.qkv_proj(x_TD)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q_THC, k_THC, v_THC = qkv_TX.unflatten(-1, (sum(self.heads), -1)).split(self.heads, dim=1)
            qkv_TX = torch.cat((self.q_layernorm(q_THC), self.k_layernorm(k_THC), v_THC), dim=1).flatten(1)
        out_THC = self.attend.rotate_and_attend(qkv_TX, rotation, kv_cache, metadata)
        out_TD: Tensor = self.o_proj(out_THC.flatten(1))
        return out_TD


class StableLMLayer(ParallelModule):
    def __init__(
        self, config: ModelConfig, gqa: GQAConfig, *, layer_index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        assert isinstance(config.switches, StableLMSwitches)
        self.input_layernorm = LayerNorm(size, eps=eps, dtype=dtype)
        self.self_attn = StableLMAttention(config, gqa, layer_index=layer_index, backend=backend, dtype=dtype)
        parallel = config.switches.parallel
        self.post_attention_layernorm = None if parallel else LayerNorm(size, eps=eps, dtype=dtype)
        self.mlp = GatedMLP(size, config.intermediate_size, dtype=dtype)

    def forward(self, x_TD: Tensor, rotation: Rotation, kv_cache: PagedKVCache, metadata: AttentionMetadata) -> Tensor:
        normed_TD = self.input_layernorm(x_TD)
        attended_TD = self.self_attn(normed_TD, rotation, kv_cache, metadata)
        if self.post_attention_layernorm is None:
            return x_TD + self.parallel.all_reduce(attended_TD + self.mlp(normed_TD))
        x_TD = x_TD + self.parallel.all_reduce(attended_TD)
        return x_TD + self.parallel.all_reduce(self.mlp(self.post_attention_layernorm(x_TD)))


class StableLMForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa = config.attention
        assert isinstance(gqa, GQAConfig)
        layers = [
            StableLMLayer(config, gqa, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        norm = LayerNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        super().__init__(config, layers, dtype=dtype, norm=norm)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, context: StepContext) -> Tensor:
        assert self.rotary is not None
        rotation = self.rotary(positions_T)
        hidden_TD = self.model.embed_tokens(token_ids_T)
        for layer in self.model.layers:
            hidden_TD = layer(hidden_TD, rotation, kv_cache, context.metadata)
        out_TD: Tensor = self.model.norm(hidden_TD)
        return out_TD
