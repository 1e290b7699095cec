"""gpt-oss: attention with sinks, a window in every other layer, and experts with biases and a clamped activation.

The attention is Llama's. Shapes: T token, D hidden channel, K chosen expert of a token, I intermediate channel, R row
of some expert.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from attention.backend import AttentionBackend
from models.causal_lm import CausalLM, DecoderLayer
from models.config.model_config import GQAConfig, ModelConfig, MoEConfig
from models.families.gpt_oss_config import GptOssSwitches
from models.families.llama import LlamaAttention
from models.kernels.grouped_gemm import Activation, ExpertWeights, run_gated_experts
from models.layers import RMSNorm
from models.linear import Multiply
from models.moe import Router, run_experts, sigmoid, weighted_sum


class GptOssExperts(nn.Module):
    """Experts as checkpoints have them: all in one tensor, inputs first, gates at even channels and ups at odd ones.

    Attributes: as in `models.moe.Experts`.
    """

    def __init__(self, size: int, moe: MoEConfig, switches: GptOssSwitches, *, dtype: torch.dtype) -> None:
        super().__init__()
        num_experts, intermediate_size = moe.num_experts, moe.intermediate_size
        self.limit, self.alpha = switches.swiglu_limit, switches.swiglu_alpha
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, size, 2 * intermediate_size, dtype=dtype))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(num_experts, intermediate_size, size, dtype=dtype))
        self.down_proj_bias = nn.Parameter(torch.empty(num_experts, size, dtype=dtype))
        self.multiply: Multiply = linear
        self.batch_invariant = False

    def forward(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        if x_TD.is_cuda:
            return self.run_grouped(x_TD, weights_TK, experts_TK)
        return weighted_sum(run_experts(x_TD, experts_TK, len(self.gate_up_proj), self._one), weights_TK)

    def run_grouped(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """`forward` on a GPU; the host waits for nothing."""
        return run_gated_experts(
            x_TD,
            weights_TK,
            experts_TK,
            ExpertWeights(self.gate_up_proj.transpose(1, 2), self.gate_up_proj_bias),
            ExpertWeights(self.down_proj.transpose(1, 2), self.down_proj_bias),
            activation=Activation(interleaved=True, limit=self.limit, alpha=self.alpha),
            batch_invariant=self.batch_invariant,
        )

    def _one(self, expert: int, x_RD: Tensor) -> Tensor:
        gate_up_RI = self.multiply(x_RD, self.gate_up_proj[expert].t(), self.gate_up_proj_bias[expert])
        gate_RI = gate_up_RI[:, ::2].clamp(max=self.limit)
        up_RI = gate_up_RI[:, 1::2].clamp(-self.limit, self.limit)
        gated_RI = gate_RI * sigmoid(self.alpha * gate_RI) * (up_RI + 1)
        return self.multiply(gated_RI, self.down_proj[expert].t(), self.down_proj_bias[expert])


class GptOssMoE(nn.Module):
    def __init__(self, size: int, moe: MoEConfig, switches: GptOssSwitches, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.router = Router(size, moe)
        self.experts = GptOssExperts(size, moe, switches, dtype=dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD: Tensor = self.experts(x_TD, *self.router(x_TD))
        return out_TD


class GptOssLayer(DecoderLayer):
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


class GptOssForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa = config.attention
        assert isinstance(gqa, GQAConfig)
        layers = [
            GptOssLayer(config, gqa, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        super().__init__(config, layers, dtype=dtype)
