"""LFM2: most layers mix a few tokens by a gated short convolution, the others attend; dense or with experts.

Shapes: T token, D hidden channel, X channel of this rank's convolution, W tap, S slot, H head, C channel of a head.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend
from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.families.dense.llama import LlamaAttention, make_mlp
from baton.models.families.hybrid.lfm2_config import Lfm2Switches
from baton.models.kernels.recurrent.state_rows import StateRows
from baton.models.layers.causal_lm import CausalLM, DecoderLayer
from baton.models.layers.linear import Linear
from baton.models.layers.norms import RMSNorm
from baton.models.layers.parallel import DeferredSum
from baton.models.layers.recurrent.short_conv import DepthwiseWeights, short_conv
from baton.models.layers.step_context import StepContext


class GatedShortConv(nn.Module):
    """A gated short convolution. One projection gives two gates and the input; the gates apply before and after the
    convolution.

    Args:
        state_layer: index of the layer among layers with a state.
    """

    def __init__(self, config: ModelConfig, *, state_layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        switches, recurrent = config.switches, config.recurrent
        assert isinstance(switches, Lfm2Switches)
        assert recurrent is not None
        self.state_layer = state_layer
        self.past = switches.conv_width - 1
        num_channels = recurrent.num_heads * (recurrent.head_channels // self.past)
        self.in_proj = Linear(config.hidden_size, 3 * num_channels, dtype=dtype, bias=switches.conv_bias)
        self.conv = DepthwiseWeights(num_channels, switches.conv_width, dtype=dtype, bias=switches.conv_bias)
        self.out_proj = Linear(num_channels, config.hidden_size, dtype=dtype, bias=switches.conv_bias)

    def forward(self, x_TD: Tensor, kv_cache: PagedKVCache, rows: StateRows) -> Tensor:
        assert kv_cache.state is not None
        state_SHCW = kv_cache.state.layer(self.state_layer)[0, :, 0].unflatten(-1, (-1, self.past))
        before_TX, after_TX, x_TX = self.in_proj(x_TD).chunk(3, dim=-1)
        x_THC = (before_TX * x_TX).unflatten(-1, state_SHCW.shape[1:3])
        mixed_TX = short_conv(x_THC, self.conv.weight.squeeze(1), self.conv.bias, state_SHCW, rows)
        out_TD: Tensor = self.out_proj(after_TX * mixed_TX)
        return out_TD


class Lfm2Layer(DecoderLayer):
    """One layer of LFM2: a gated convolution or attention, then an MLP.

    Attributes:
        conv: the convolution; None if the layer attends.
    """

    def __init__(
        self, config: ModelConfig, gqa: GQAConfig, *, layer_index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        recurs = config.recurrent is not None and config.recurrent.layers[layer_index]
        own_index = config.cache_layer(layer_index)
        self.input_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.conv: GatedShortConv | None = None
        if recurs:
            self.conv = GatedShortConv(config, state_layer=own_index, dtype=dtype)
        else:
            self.self_attn = LlamaAttention(
                size, gqa, layer_index=own_index, norm_eps=eps, backend=backend, dtype=dtype
            )
        self.post_attention_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.mlp = make_mlp(config, layer_index, dtype=dtype)

    def forward(  # type: ignore[override]
        self,
        stream_TD: Tensor,
        update_TD: Tensor | DeferredSum | None,
        rotation: Rotation,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        rows: StateRows | None,
    ) -> Tensor | DeferredSum:
        """Does what `DecoderLayer.forward` does; `rows` are the states of the step."""
        normed_TD = self.input_layernorm.add_and_norm(stream_TD, update_TD)
        if self.conv is None:
            part_TD = self.self_attn(normed_TD, rotation, kv_cache, metadata)
        else:
            assert rows is not None
            part_TD = self.conv(normed_TD, kv_cache, rows)
        normed_TD = self.post_attention_layernorm.add_and_norm(stream_TD, self.update(part_TD))
        return self.update(self.mlp(normed_TD))


class Lfm2ForCausalLM(CausalLM):
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "model.norm.": "model.embedding_norm.",
            "model.layers.*.input_layernorm.": "model.layers.*.operator_norm.",
            "model.layers.*.post_attention_layernorm.": "model.layers.*.ffn_norm.",
            "model.layers.*.self_attn.o_proj.": "model.layers.*.self_attn.out_proj.",
            "model.layers.*.self_attn.q_norm.": "model.layers.*.self_attn.q_layernorm.",
            "model.layers.*.self_attn.k_norm.": "model.layers.*.self_attn.k_layernorm.",
            "model.layers.*.mlp.gate_proj.": "model.layers.*.feed_forward.w1.",
            "model.layers.*.mlp.up_proj.": "model.layers.*.feed_forward.w3.",
            "model.layers.*.mlp.down_proj.": "model.layers.*.feed_forward.w2.",
            "model.layers.*.mlp.gate.e_score_correction_bias": "model.layers.*.feed_forward.expert_bias",
            "model.layers.*.mlp.gate.": "model.layers.*.feed_forward.gate.",
        }
    )

    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa = config.attention
        assert isinstance(gqa, GQAConfig)
        layers = [
            Lfm2Layer(config, gqa, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        super().__init__(config, layers, dtype=dtype)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, context: StepContext) -> Tensor:
        assert self.rotary is not None
        assert isinstance(self.model.norm, RMSNorm)
        rotation = self.rotary(positions_T)
        stream_TD: Tensor = self.model.embed_tokens(token_ids_T)
        update_TD: Tensor | DeferredSum | None = None
        for layer in self.model.layers:
            update_TD = layer(stream_TD, update_TD, rotation, kv_cache, context.metadata, context.states)
        return self.model.norm.add_and_norm(stream_TD, update_TD)
