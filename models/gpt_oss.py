"""gpt-oss: attention with sinks, a window in every other layer, and experts with biases and a clamped activation.

Reads top to bottom: experts, layer, model; the attention is Llama's, with the switches of the config. Shapes: T token,
D hidden channel, K chosen expert of a token, I intermediate channel, R row of some expert.
"""

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend
from attention.cache import PagedKVCache
from attention.metadata import AttentionMetadata
from models.causal_lm import CausalLM
from models.config import GptOssSwitches, GQAConfig, ModelConfig, MoEConfig
from models.layers import RMSNorm
from models.llama import LlamaAttention
from models.moe import Router, run_experts, weighted_sum
from models.rotary import Rotation


class GptOssExperts(nn.Module):
    """As checkpoints have them: all experts in one tensor, inputs first, gates at even channels and ups at odd ones."""

    def __init__(self, size: int, moe: MoEConfig, switches: GptOssSwitches, *, dtype: torch.dtype) -> None:
        super().__init__()
        num_experts, intermediate_size = moe.num_experts, moe.intermediate_size
        self.limit, self.alpha = switches.swiglu_limit, switches.swiglu_alpha
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, size, 2 * intermediate_size, dtype=dtype))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(num_experts, intermediate_size, size, dtype=dtype))
        self.down_proj_bias = nn.Parameter(torch.empty(num_experts, size, dtype=dtype))

    def forward(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        return weighted_sum(run_experts(x_TD, experts_TK, len(self.gate_up_proj), self._one), weights_TK)

    def _one(self, expert: int, x_RD: Tensor) -> Tensor:
        gate_up_RI = torch.addmm(self.gate_up_proj_bias[expert], x_RD, self.gate_up_proj[expert])
        gate_RI = gate_up_RI[:, ::2].clamp(max=self.limit)
        up_RI = gate_up_RI[:, 1::2].clamp(-self.limit, self.limit)
        gated_RI = gate_RI * torch.sigmoid(self.alpha * gate_RI) * (up_RI + 1)
        return torch.addmm(self.down_proj_bias[expert], gated_RI, self.down_proj[expert])


class GptOssMoE(nn.Module):
    def __init__(self, size: int, moe: MoEConfig, switches: GptOssSwitches, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.router = Router(size, moe)
        self.experts = GptOssExperts(size, moe, switches, dtype=dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD: Tensor = self.experts(x_TD, *self.router(x_TD))
        return out_TD


class GptOssLayer(nn.Module):
    def __init__(
        self, config: ModelConfig, gqa: GQAConfig, *, layer_index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert config.moe is not None
        assert isinstance(config.switches, GptOssSwitches)
        size, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.self_attn = LlamaAttention(size, gqa, layer_index=layer_index, norm_eps=eps, backend=backend, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.mlp = GptOssMoE(size, config.moe, config.switches, dtype=dtype)

    def forward(self, x_TD: Tensor, rotation: Rotation, kv_cache: PagedKVCache, metadata: AttentionMetadata) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), rotation, kv_cache, metadata)
        out_TD: Tensor = x_TD + self.mlp(self.post_attention_layernorm(x_TD))
        return out_TD


class GptOssForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa = config.attention
        assert isinstance(gqa, GQAConfig)
        layers = [
            GptOssLayer(config, gqa, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        super().__init__(config, layers, dtype=dtype)
