"""gpt-oss: attention with sinks, a window in every other layer, and experts with biases and a clamped activation.

The attention is Llama's. Shapes: T token, D hidden channel, K chosen expert of a token, I intermediate channel, R row
of some expert.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from attention.backend import AttentionBackend
from baton.models.config.model_config import GQAConfig, ModelConfig, MoEConfig
from baton.models.config.quantization.mxfp4_config import MXFP4_BLOCK
from baton.models.families.dense.llama import LlamaAttention
from baton.models.families.moe.gpt_oss_config import GptOssSwitches
from baton.models.formats import mxfp4
from baton.models.formats.mxfp4_tiles import tile_
from baton.models.kernels.activation import clamp_and_gate
from baton.models.kernels.moe.expert_weights import ExpertWeights
from baton.models.kernels.moe.grouped_gemm import GroupedActivation, run_gated_experts
from baton.models.kernels.quantized.mxfp4_experts import ClampedGate, reads_tiles, run_tiled_experts
from baton.models.kernels.quantized.packed_experts import Mxfp4Weight, run_packed_experts
from baton.models.layers.causal_lm import CausalLM, DecoderLayer
from baton.models.layers.elementwise import sigmoid
from baton.models.layers.linear import Multiply
from baton.models.layers.moe.experts import RoutedExperts, run_experts, weighted_sum
from baton.models.layers.moe.router import Router
from baton.models.layers.norms import RMSNorm


class GptOssExperts(RoutedExperts):
    """Experts in checkpoints' layout: all in one tensor, inputs first, gates at even channels and ups at odd ones.

    Attributes: as in `baton.models.layers.moe.experts.Experts`.
    """

    def __init__(self, size: int, moe: MoEConfig, switches: GptOssSwitches, *, dtype: torch.dtype) -> None:
        super().__init__(moe.num_experts, moe.held)
        num_experts, intermediate_size = len(moe.held), moe.intermediate_size
        self.num_experts = num_experts
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
        places_TK = self.places(experts_TK)
        return weighted_sum(run_experts(x_TD, places_TK, self.num_experts, self._one), weights_TK)

    def run_grouped(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Runs `forward` on a GPU without making the host wait."""
        return run_gated_experts(
            x_TD,
            weights_TK,
            self.places(experts_TK),
            ExpertWeights(self.gate_up_proj.transpose(1, 2), self.gate_up_proj_bias),
            ExpertWeights(self.down_proj.transpose(1, 2), self.down_proj_bias),
            activation=GroupedActivation(interleaved=True, limit=self.limit, alpha=self.alpha),
            batch_invariant=self.batch_invariant,
            of=self.of,
        )

    def _one(self, expert: int, x_RD: Tensor) -> Tensor:
        gate_up, down = self._weights(expert)
        gated_RI = self._activate(self.multiply(x_RD, gate_up, self.gate_up_proj_bias[expert]))
        return self.multiply(gated_RI, down, self.down_proj_bias[expert])

    def _weights(self, expert: int) -> tuple[Tensor, Tensor]:
        """Returns both layers' weights, outputs first."""
        return self.gate_up_proj[expert].t(), self.down_proj[expert].t()

    def _activate(self, gate_up_RI: Tensor) -> Tensor:
        if gate_up_RI.is_cuda:
            return clamp_and_gate(gate_up_RI, limit=self.limit, alpha=self.alpha)
        gate_RI = gate_up_RI[:, ::2].clamp(max=self.limit)
        up_RI = gate_up_RI[:, 1::2].clamp(-self.limit, self.limit)
        return gate_RI * sigmoid(self.alpha * gate_RI) * (up_RI + 1)


class Mxfp4Experts(GptOssExperts):
    """Experts in the published form: outputs first, 32 inputs in 16 bytes with a power of two."""

    gate_up_proj_blocks: nn.Parameter
    gate_up_proj_scales: nn.Parameter
    down_proj_blocks: nn.Parameter
    down_proj_scales: nn.Parameter
    in_tiles: bool = False  # the form of `baton.models.formats.mxfp4_tiles`

    def __init__(self, size: int, moe: MoEConfig, switches: GptOssSwitches, *, dtype: torch.dtype) -> None:
        with torch.device("meta"):
            super().__init__(size, moe, switches, dtype=dtype)
        self.locate()
        del self.gate_up_proj, self.down_proj
        for name, rows, columns in (
            ("gate_up_proj", 2 * moe.intermediate_size, size),
            ("down_proj", size, moe.intermediate_size),
        ):
            groups = columns // MXFP4_BLOCK
            blocks = torch.empty(len(moe.held), rows, groups, mxfp4.BLOCK_BYTES, dtype=torch.uint8)
            scales = torch.empty(len(moe.held), rows, groups, dtype=torch.uint8)
            bias = torch.empty(len(moe.held), rows, dtype=dtype)
            for suffix, tensor in (("blocks", blocks), ("scales", scales), ("bias", bias)):
                setattr(self, f"{name}_{suffix}", nn.Parameter(tensor, requires_grad=False))

    def finish(self) -> None:
        """Converts the loaded blocks to the form that products read."""
        for blocks in (*self.gate_up_proj_blocks.data, *self.down_proj_blocks.data):
            mxfp4.repack_(blocks)
        weights = self._packed()
        self.in_tiles = all(reads_tiles(weight, self.down_proj_bias.dtype) for weight in weights)
        if self.in_tiles:
            for weight in weights:
                for expert in zip(weight.stored_ENB, weight.scales_ENG, strict=True):
                    tile_(*expert)

    def _packed(self) -> tuple[Mxfp4Weight, Mxfp4Weight]:
        """Returns both layers' weights, gate and up first."""
        return (
            Mxfp4Weight(self.gate_up_proj_blocks.data.flatten(2), self.gate_up_proj_scales.data),
            Mxfp4Weight(self.down_proj_blocks.data.flatten(2), self.down_proj_scales.data),
        )

    def scales(self) -> dict[str, Tensor]:
        """Returns the scales by their names in this module."""
        return {name: getattr(self, name).data for name in ("gate_up_proj_scales", "down_proj_scales")}

    def run_grouped(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        gate_up, down = self._packed()
        places_TK = self.places(experts_TK)
        if self.in_tiles:
            return run_tiled_experts(
                x_TD,
                weights_TK,
                places_TK,
                gate_up,
                down,
                ClampedGate(self.limit, self.alpha),
                gate_up_bias_EN=self.gate_up_proj_bias,
                down_bias_EN=self.down_proj_bias,
                batch_invariant=self.batch_invariant,
                of=self.of,
            )
        return run_packed_experts(
            x_TD,
            weights_TK,
            places_TK,
            gate_up,
            down,
            activate=self._activate,
            gate_up_bias_EN=self.gate_up_proj_bias,
            down_bias_EN=self.down_proj_bias,
            batch_invariant=self.batch_invariant,
            of=self.of,
        )

    def _weights(self, expert: int) -> tuple[Tensor, Tensor]:
        dtype = self.down_proj_bias.dtype
        gate_up = mxfp4.dequantize(self.gate_up_proj_blocks[expert], self.gate_up_proj_scales[expert], dtype=dtype)
        down = mxfp4.dequantize(self.down_proj_blocks[expert], self.down_proj_scales[expert], dtype=dtype)
        return gate_up, down


class GptOssMoE(nn.Module):
    def __init__(
        self, size: int, moe: MoEConfig, switches: GptOssSwitches, *, in_mxfp4: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.router = Router(size, moe)
        experts = Mxfp4Experts if in_mxfp4 else GptOssExperts
        self.experts = experts(size, moe, switches, dtype=dtype)

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
        quantization = config.quantization
        in_mxfp4 = quantization is not None and quantization.covers(f"model.layers.{layer_index}.mlp.experts")
        self.mlp = GptOssMoE(size, config.moe, config.switches, in_mxfp4=in_mxfp4, dtype=dtype)


class GptOssForCausalLM(CausalLM):
    shows_stream: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa = config.attention
        assert isinstance(gqa, GQAConfig)
        layers = [
            GptOssLayer(config, gqa, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        super().__init__(config, layers, dtype=dtype)
