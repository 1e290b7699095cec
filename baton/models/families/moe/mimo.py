"""MiMo-V2-Flash: values narrower than keys; sinks and more kv heads in layers with a window; DeepSeek-V3's experts.

Shapes: T token, D hidden channel, H query head, K kv head, C channel of a key, V channel of a value.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attention.backend import AttentionBackend
from attention.layer import Attention
from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.families.dense.llama import make_mlp
from baton.models.families.moe.mimo_config import MiMoSwitches
from baton.models.layers.causal_lm import CausalLM, DecoderLayer
from baton.models.layers.linear import FusedLinear, Linear
from baton.models.layers.norms import RMSNorm
from baton.models.layers.rotary import Rotary
from baton.models.layers.step_context import StepContext


class NarrowValueAttention(nn.Module):
    """Grouped-query attention whose values have fewer channels than keys. A cache has one width for both, so each value
    is padded with zeros there, and the output's zero channels are cut off."""

    def __init__(
        self,
        hidden_size: int,
        gqa: GQAConfig,
        *,
        value_scale: float,
        layer_index: int,
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        window = gqa.sliding_windows[layer_index]
        self.num_kv_heads, self.head_dim = gqa.heads_of(layer_index)
        self.value_dim, self.value_scale = gqa.value_dim, value_scale
        q_size, k_size = gqa.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.sizes = [q_size + k_size, self.num_kv_heads * self.value_dim]
        parts = (("q_proj", q_size), ("k_proj", k_size), ("v_proj", self.sizes[1]))
        self.qkv_proj = FusedLinear(hidden_size, parts, dtype=dtype, bias=gqa.qkv_bias)
        self.o_proj = Linear(gqa.num_heads * self.value_dim, hidden_size, dtype=dtype, bias=gqa.output_bias)
        # float32 for every model dtype, because the softmax is in float32.
        sinks = torch.empty(gqa.num_heads, dtype=torch.float32)
        self.sinks = nn.Parameter(sinks) if gqa.sinks and window is not None else None
        self.attend = Attention(
            num_heads=gqa.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=gqa.scale,
            layer_index=layer_index,
            backend=backend,
            sliding_window=window,
            sinks=self.sinks,
        )

    def forward(self, x_TD: Tensor, rotation: Rotation, kv_cache: PagedKVCache, metadata: AttentionMetadata) -> Tensor:
        qk_TX, v_TX = self.qkv_proj(x_TD).split(self.sizes, dim=-1)
        v_TKV = v_TX.unflatten(-1, (self.num_kv_heads, self.value_dim))
        if self.value_scale != 1.0:
            v_TKV = v_TKV * self.value_scale
        v_TKC = pad(v_TKV, (0, self.head_dim - self.value_dim))
        qkv_TX = torch.cat((qk_TX, v_TKC.flatten(1)), dim=-1)
        out_THC = self.attend.rotate_and_attend(qkv_TX, rotation, kv_cache, metadata)
        out_TD: Tensor = self.o_proj(out_THC[..., : self.value_dim].flatten(1))
        return out_TD


class MiMoLayer(DecoderLayer):
    def __init__(
        self, config: ModelConfig, gqa: GQAConfig, *, layer_index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert isinstance(config.switches, MiMoSwitches)
        size, eps, scale = config.hidden_size, config.norm_eps, config.switches.value_scale
        self.slides = gqa.sliding_windows[layer_index] is not None
        self.input_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.self_attn = NarrowValueAttention(
            size, gqa, value_scale=scale, layer_index=layer_index, backend=backend, dtype=dtype
        )
        self.post_attention_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.mlp = make_mlp(config, layer_index, dtype=dtype)


class MiMoV2FlashForCausalLM(CausalLM):
    shows_stream: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa = config.attention
        assert isinstance(gqa, GQAConfig)
        assert config.local_rope is not None
        layers = [
            MiMoLayer(config, gqa, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        super().__init__(config, layers, dtype=dtype)
        self.local_rotary = Rotary(config.local_rope)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, context: StepContext) -> Tensor:
        assert self.rotary is not None
        assert isinstance(self.model.norm, RMSNorm)
        rotations = {False: self.rotary(positions_T), True: self.local_rotary(positions_T)}
        stream_TD: Tensor = self.model.embed_tokens(token_ids_T)
        update_TD: Tensor | None = None
        for layer in self.model.layers:
            update_TD = layer(stream_TD, update_TD, rotations[bool(layer.slides)], kv_cache, context.metadata)
        return self.model.norm.add_and_norm(stream_TD, update_TD)
