"""Gemma 4's text model. Layers without a window have larger heads, the last layers may read earlier layers' keys and
values, each layer may have its own extra input, and experts may run next to the dense MLP.

Shapes: T token, D hidden channel, I intermediate channel, K chosen expert of a token, L layer, P channel of a layer's
input, R row of some expert.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from attention.backend import AttentionBackend
from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import GQAConfig, ModelConfig, MoEConfig
from baton.models.families.dense.gemma4_config import Gemma4Switches
from baton.models.families.dense.gemma_parts import (
    LayerInputs,
    LayerWithInput,
    SharingAttention,
    norm_without_weight,
    rounded,
)
from baton.models.kernels.moe.expert_weights import ExpertWeights
from baton.models.kernels.moe.grouped_gemm import GroupedActivation, run_gated_experts
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.linear import Multiply
from baton.models.layers.mlp import GatedMLP, gelu_tanh_and_multiply
from baton.models.layers.moe.experts import RoutedExperts, run_experts, weighted_sum
from baton.models.layers.moe.router import Router
from baton.models.layers.norms import RMSNorm
from baton.models.layers.rotary import Rotary
from baton.models.layers.step_context import StepContext

_GELU = GroupedActivation(tanh_gelu=True)


class Gemma4Router(nn.Module):
    """Chooses experts by the normed and scaled stream; each expert's weight has its own factor."""

    def __init__(self, size: int, moe: MoEConfig, *, norm_eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm_eps, self.root = norm_eps, size**-0.5
        self.proj = Router(size, moe)
        self.scale = nn.Parameter(torch.empty(size, dtype=dtype))
        self.per_expert_scale = nn.Parameter(torch.empty(moe.num_experts, dtype=torch.float32))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns weights and experts as `baton.models.layers.moe.router.Router` does."""
        weights_TK, experts_TK = self.proj(norm_without_weight(x_TD, self.norm_eps) * self.scale * self.root)
        return weights_TK * self.per_expert_scale[experts_TK], experts_TK


class Gemma4Experts(RoutedExperts):
    """Experts in checkpoints' layout: all in one tensor, outputs first, all gates before all ups.

    Attributes: as in `baton.models.layers.moe.experts.Experts`.
    """

    def __init__(self, size: int, moe: MoEConfig, *, dtype: torch.dtype) -> None:
        super().__init__(moe.num_experts, moe.held)
        self.gate_up_proj = nn.Parameter(torch.empty(len(moe.held), 2 * moe.intermediate_size, size, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(len(moe.held), size, moe.intermediate_size, dtype=dtype))
        self.multiply: Multiply = linear
        self.batch_invariant = False

    def forward(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        if x_TD.is_cuda:
            return self.run_grouped(x_TD, weights_TK, experts_TK)
        places_TK = self.places(experts_TK)
        return weighted_sum(run_experts(x_TD, places_TK, len(self.gate_up_proj), self._one), weights_TK)

    def run_grouped(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Runs `forward` on a GPU without making the host wait."""
        return run_gated_experts(
            x_TD,
            weights_TK,
            self.places(experts_TK),
            ExpertWeights(self.gate_up_proj),
            ExpertWeights(self.down_proj),
            activation=_GELU,
            batch_invariant=self.batch_invariant,
            of=self.of,
        )

    def _one(self, expert: int, x_RD: Tensor) -> Tensor:
        gated_RI = gelu_tanh_and_multiply(self.multiply(x_RD, self.gate_up_proj[expert], None))
        return self.multiply(gated_RI, self.down_proj[expert], None)


class Gemma4Layer(LayerWithInput):
    """One layer of Gemma 4.

    Args:
        before: the attentions of the layers before this one.
    """

    def __init__(
        self,
        config: ModelConfig,
        gqa: GQAConfig,
        switches: Gemma4Switches,
        *,
        layer_index: int,
        before: Sequence[SharingAttention],
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> None:
        size, eps, moe = config.hidden_size, config.norm_eps, config.moe
        super().__init__(size, switches.input_size, norm_eps=eps, dtype=dtype)
        self.slides = gqa.sliding_windows[layer_index] is not None
        self.input_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.self_attn = SharingAttention(
            size,
            gqa,
            layer_index=layer_index,
            before=before,
            norm_eps=eps,
            backend=backend,
            dtype=dtype,
            values_are_keys=switches.values_are_keys and not self.slides,
        )
        self.post_attention_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.pre_feedforward_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.mlp = GatedMLP(size, config.mlp_size(layer_index), dtype=dtype, activate=gelu_tanh_and_multiply)
        self.post_feedforward_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.layer_scalar = nn.Parameter(torch.empty(1, dtype=dtype))
        self.router: Gemma4Router | None = None
        if moe is not None:
            self.router = Gemma4Router(size, moe, norm_eps=eps, dtype=dtype)
            self.experts = Gemma4Experts(size, moe, dtype=dtype)
            self.pre_feedforward_layernorm_2 = RMSNorm(size, eps=eps, dtype=dtype)
            self.post_feedforward_layernorm_1 = RMSNorm(size, eps=eps, dtype=dtype)
            self.post_feedforward_layernorm_2 = RMSNorm(size, eps=eps, dtype=dtype)

    def forward(
        self,
        stream_TD: Tensor,
        input_TP: Tensor | None,
        rotation: Rotation,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Changes the stream in place and returns it."""
        normed_TD = self.input_layernorm(stream_TD)
        attended_TD = self.parallel.all_reduce(self.self_attn(normed_TD, rotation, kv_cache, metadata))
        normed_TD = self.pre_feedforward_layernorm.add_and_norm(
            stream_TD, attended_TD, update_norm=self.post_attention_layernorm
        )
        out_TD = self.parallel.all_reduce(self.mlp(normed_TD))
        if self.router is not None:
            routed_TD = self.experts(self.pre_feedforward_layernorm_2(stream_TD), *self.router(stream_TD))
            routed_TD = self.post_feedforward_layernorm_2(self.parallel.all_reduce(routed_TD))
            out_TD = self.post_feedforward_layernorm_1(out_TD) + routed_TD
        stream_TD.add_(self.post_feedforward_layernorm(out_TD))
        if input_TP is not None:
            stream_TD.add_(self.of_input(stream_TD, input_TP))
        return stream_TD.mul_(self.layer_scalar)


class Gemma4ForCausalLM(CausalLM):
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType({"inputs.": "model."})

    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa, switches = config.attention, config.switches
        assert isinstance(gqa, GQAConfig)
        assert isinstance(switches, Gemma4Switches)
        assert config.local_rope is not None
        layers: list[Any] = []
        for index in range(config.num_layers):
            before = [layer.self_attn for layer in layers]
            layers.append(
                Gemma4Layer(config, gqa, switches, layer_index=index, before=before, backend=backend, dtype=dtype)
            )
        super().__init__(config, layers, dtype=dtype)
        self.local_rotary = Rotary(config.local_rope)
        self.embedding_scale = rounded(config.hidden_size**0.5, dtype)
        self.inputs: LayerInputs | None = None
        if switches.input_size:
            self.inputs = LayerInputs(
                config.hidden_size,
                config.num_layers,
                switches.input_size,
                vocab_size=switches.input_vocab_size,
                norm_eps=config.norm_eps,
                dtype=dtype,
            )

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, context: StepContext) -> Tensor:
        assert self.rotary is not None
        rotations = {False: self.rotary(positions_T), True: self.local_rotary(positions_T)}
        stream_TD: Tensor = self.model.embed_tokens(token_ids_T) * self.embedding_scale
        inputs_TLP = None if self.inputs is None else self.inputs(token_ids_T, stream_TD)
        for index, layer in enumerate(self.model.layers):
            input_TP = None if inputs_TLP is None else inputs_TLP[:, index]
            layer(stream_TD, input_TP, rotations[bool(layer.slides)], kv_cache, context.metadata)
        hidden_TD: Tensor = self.model.norm(stream_TD)
        return hidden_TD
