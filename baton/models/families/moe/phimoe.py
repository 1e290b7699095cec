"""Phi-3.5-MoE: Llama's attention between layer norms, and experts that a sparse mixer chooses.

Shapes: T token, D hidden channel.
"""

import torch
from torch import Tensor

from attention.backend import AttentionBackend
from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.families.dense.llama import LlamaAttention, make_mlp
from baton.models.families.moe.moe_routers_config import PhimoeSwitches
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.linear import Linear
from baton.models.layers.norms import LayerNorm
from baton.models.layers.parallel import ParallelModule
from baton.models.layers.step_context import StepContext


class PhimoeLayer(ParallelModule):
    def __init__(
        self, config: ModelConfig, gqa: GQAConfig, *, layer_index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = LayerNorm(size, eps=eps, dtype=dtype)
        self.self_attn = LlamaAttention(size, gqa, layer_index=layer_index, norm_eps=eps, backend=backend, dtype=dtype)
        self.post_attention_layernorm = LayerNorm(size, eps=eps, dtype=dtype)
        self.mlp = make_mlp(config, layer_index, dtype=dtype)

    def forward(
        self, stream_TD: Tensor, rotation: Rotation, kv_cache: PagedKVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Adds the updates of both halves to the stream in place and returns it."""
        attended_TD = self.self_attn(self.input_layernorm(stream_TD), rotation, kv_cache, metadata)
        stream_TD = stream_TD.add_(self.parallel.all_reduce(attended_TD))
        return stream_TD.add_(self.parallel.all_reduce(self.mlp(self.post_attention_layernorm(stream_TD))))


class PhimoeForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa, switches = config.attention, config.switches
        assert isinstance(gqa, GQAConfig)
        assert isinstance(switches, PhimoeSwitches)
        size = config.hidden_size
        layers = [
            PhimoeLayer(config, gqa, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        super().__init__(config, layers, dtype=dtype, norm=LayerNorm(size, eps=config.norm_eps, dtype=dtype))
        if self.lm_head is not None and switches.head_bias:
            self.lm_head = Linear(size, config.vocab_size, dtype=dtype, bias=True)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, context: StepContext) -> Tensor:
        assert self.rotary is not None
        rotation = self.rotary(positions_T)
        stream_TD: Tensor = self.model.embed_tokens(token_ids_T)
        for layer in self.model.layers:
            stream_TD = layer(stream_TD, rotation, kv_cache, context.metadata)
        normed_TD: Tensor = self.model.norm(stream_TD)
        return normed_TD
