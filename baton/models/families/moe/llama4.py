"""The text model of Llama-4. Most layers have a rotary embedding and see only their chunk; the others see all tokens
and have no positions. The router's weights multiply the experts' inputs.

Shapes: T token, D hidden channel, H query head, K kv head or chosen expert, X heads of queries and keys in one tensor,
C head channel, E expert, I intermediate channel, R row.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from attention.backend import AttentionBackend
from attention.layer import Attention
from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import GQAConfig, ModelConfig, MoEConfig
from baton.models.families.moe.llama4_config import Llama4Switches, TemperatureTuning
from baton.models.kernels.moe.expert_weights import ExpertWeights
from baton.models.kernels.moe.grouped_gemm import run_gated_experts
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.linear import FusedLinear, Linear, Multiply
from baton.models.layers.mlp import GatedMLP, silu_and_multiply
from baton.models.layers.moe.experts import RoutedExperts, run_experts
from baton.models.layers.moe.router import Router
from baton.models.layers.norms import RMSNorm
from baton.models.layers.parallel import ParallelModule
from baton.models.layers.step_context import StepContext


class Llama4Attention(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        gqa: GQAConfig,
        switches: Llama4Switches,
        *,
        layer_index: int,
        norm_eps: float,
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = gqa.num_heads, gqa.num_kv_heads, gqa.head_dim
        self.has_rope = switches.rope_layers[layer_index]
        self.qk_norm_eps = norm_eps if switches.qk_norm and self.has_rope else None
        q_size, kv_size = gqa.num_heads * gqa.head_dim, gqa.num_kv_heads * gqa.head_dim
        parts = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
        self.qkv_proj = FusedLinear(hidden_size, parts, dtype=dtype, bias=gqa.qkv_bias)
        self.o_proj = Linear(q_size, hidden_size, dtype=dtype, bias=gqa.output_bias)
        self.attend = Attention(
            num_heads=gqa.num_heads,
            num_kv_heads=gqa.num_kv_heads,
            head_dim=gqa.head_dim,
            scale=gqa.scale,
            layer_index=layer_index,
            backend=backend,
            attention_chunk_size=gqa.attention_chunk_sizes[layer_index],
        )

    def forward(
        self,
        x_TD: Tensor,
        rotation: Rotation,
        temperature_T11: Tensor | None,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        qkv_TXC = self.qkv_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        qk_TXC, v_TKC = torch.split(qkv_TXC, [self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.has_rope:
            qk_TXC = rotation.apply(qk_TXC)
        if self.qk_norm_eps is not None:
            qk_TXC = rms_norm(qk_TXC.float(), (self.head_dim,), eps=self.qk_norm_eps).to(qk_TXC.dtype)
        q_THC, k_TKC = torch.split(qk_TXC, [self.num_heads, self.num_kv_heads], dim=1)
        if temperature_T11 is not None and not self.has_rope:
            q_THC = (q_THC * temperature_T11).to(q_THC.dtype)
        out_THC = self.attend(q_THC, k_TKC, v_TKC, kv_cache, metadata)
        out_TD: Tensor = self.o_proj(out_THC.flatten(1))
        return out_TD


class Llama4Experts(RoutedExperts):
    """Experts in checkpoints' layout: all in one tensor, inputs first, all gates before all ups.

    Attributes: as in `baton.models.layers.moe.experts.Experts`.
    """

    def __init__(
        self,
        num_experts: int,
        size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype,
        held: range | None = None,
    ) -> None:
        held = range(num_experts) if held is None else held
        super().__init__(num_experts, held)
        num_experts = len(held)
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, size, 2 * intermediate_size, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(num_experts, intermediate_size, size, dtype=dtype))
        self.multiply: Multiply = linear
        self.batch_invariant = False

    def forward(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, *, plus_TD: Tensor | None = None) -> Tensor:
        if x_TD.is_cuda:
            return self.run_grouped(x_TD, weights_TK, experts_TK, plus_TD=plus_TD)
        x_TKD = x_TD.unsqueeze(1) * weights_TK.unsqueeze(-1).to(x_TD.dtype)
        out_TD = run_experts(x_TKD.flatten(0, 1), self.places(experts_TK), len(self.gate_up_proj), self._one).sum(dim=1)
        return out_TD if plus_TD is None else plus_TD + out_TD

    def run_grouped(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, *, plus_TD: Tensor | None = None
    ) -> Tensor:
        """Runs `forward` on a GPU without making the host wait."""
        return run_gated_experts(
            x_TD,
            weights_TK,
            self.places(experts_TK),
            ExpertWeights(self.gate_up_proj.transpose(1, 2)),
            ExpertWeights(self.down_proj.transpose(1, 2)),
            weights_on_input=True,
            batch_invariant=self.batch_invariant,
            plus_TD=plus_TD,
            of=self.of,
        )

    def _one(self, expert: int, x_RD: Tensor) -> Tensor:
        gate_up_RI = self.multiply(x_RD, self.gate_up_proj[expert].t(), None)
        return self.multiply(silu_and_multiply(gate_up_RI), self.down_proj[expert].t(), None)


class Llama4MoE(nn.Module):
    def __init__(self, size: int, moe: MoEConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.router = Router(size, moe)
        self.experts = Llama4Experts(moe.num_experts, size, moe.intermediate_size, dtype=dtype, held=moe.held)
        self.shared_expert = GatedMLP(size, moe.shared_intermediate_size, dtype=dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD: Tensor = self.experts(x_TD, *self.router(x_TD), plus_TD=self.shared_expert(x_TD))
        return out_TD


class Llama4Layer(ParallelModule):
    def __init__(
        self,
        config: ModelConfig,
        gqa: GQAConfig,
        switches: Llama4Switches,
        *,
        layer_index: int,
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.self_attn = Llama4Attention(
            size, gqa, switches, layer_index=layer_index, norm_eps=eps, backend=backend, dtype=dtype
        )
        self.post_attention_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.feed_forward: nn.Module
        if config.moe is not None and config.moe.layers[layer_index]:
            self.feed_forward = Llama4MoE(size, config.moe, dtype=dtype)
        else:
            self.feed_forward = GatedMLP(size, config.intermediate_size, dtype=dtype)

    def forward(
        self,
        stream_TD: Tensor,
        update_TD: Tensor | None,
        rotation: Rotation,
        temperature_T11: Tensor | None,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Adds the previous layer's update and this layer's attention to the stream; returns this layer's MLP's
        update."""
        normed_TD = self.input_layernorm.add_and_norm(stream_TD, update_TD)
        attended_TD = self.self_attn(normed_TD, rotation, temperature_T11, kv_cache, metadata)
        normed_TD = self.post_attention_layernorm.add_and_norm(stream_TD, self.parallel.all_reduce(attended_TD))
        return self.parallel.all_reduce(self.feed_forward(normed_TD))


class Llama4ForCausalLM(CausalLM):
    shows_stream: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa, switches = config.attention, config.switches
        assert isinstance(gqa, GQAConfig)
        assert isinstance(switches, Llama4Switches)
        layers = [
            Llama4Layer(config, gqa, switches, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        super().__init__(config, layers, dtype=dtype)
        self.temperature = switches.temperature

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, context: StepContext) -> Tensor:
        assert self.rotary is not None
        rotation = self.rotary(positions_T)
        temperature_T11 = None if self.temperature is None else _temperature(positions_T, self.temperature)
        stream_TD: Tensor = self.model.embed_tokens(token_ids_T)
        update_TD: Tensor | None = None
        for layer in self.model.layers:
            update_TD = layer(stream_TD, update_TD, rotation, temperature_T11, kv_cache, context.metadata)
        assert isinstance(self.model.norm, RMSNorm)
        return self.model.norm.add_and_norm(stream_TD, update_TD)


def _temperature(positions_T: Tensor, tuning: TemperatureTuning) -> Tensor:
    """Returns factors of queries, float32 [T,1,1], which grow with position, because later queries see more keys."""
    steps_T = torch.floor((positions_T.float() + 1) / tuning.floor_tokens)
    return (1 + tuning.scale * torch.log1p(steps_T))[:, None, None]
