"""Kimi-Linear: Kimi delta attention (arXiv 2510.26692), with latent attention without positions in every fourth layer.

Shapes: T token, D hidden channel, H head, K channel of a head, P pair of rotary channels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend
from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import MLAConfig, ModelConfig
from baton.models.families.hybrid.delta_config import DeltaSwitches
from baton.models.families.hybrid.delta_parts import DeltaMixer, by_head
from baton.models.families.latent.deepseek import DeepseekAttention
from baton.models.kernels.recurrent.state_rows import StateRows
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.indexer import Selection
from baton.models.layers.linear import FusedLinear, Linear
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.moe.moe import MoE
from baton.models.layers.norms import RMSNorm
from baton.models.layers.parallel import ParallelModule
from baton.models.layers.recurrent.delta_gates import correction_rates, log_decays
from baton.models.layers.recurrent.gated_norm import GatedRMSNorm
from baton.models.layers.recurrent.short_conv import DepthwiseWeights
from baton.models.layers.step_context import StepContext


class KimiDeltaAttention(DeltaMixer):
    """A delta rule in which every channel of a key fades at its own rate. Rates and the output's gate come from two
    products with few channels in between."""

    def __init__(
        self,
        hidden_size: int,
        switches: DeltaSwitches,
        *,
        num_heads: int,
        layer_index: int,
        norm_eps: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(switches, num_heads=num_heads, layer_index=layer_index)
        size, rank = self.key_size, switches.key_dim
        self.qkv_proj = FusedLinear(hidden_size, (("q_proj", size), ("k_proj", size), ("v_proj", size)), dtype=dtype)
        self.gates_proj = FusedLinear(
            hidden_size, (("f_a_proj", rank), ("g_a_proj", rank), ("b_proj", num_heads)), dtype=dtype
        )
        self.f_b_proj = Linear(rank, size, dtype=dtype)
        self.g_b_proj = Linear(rank, size, dtype=dtype)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            DepthwiseWeights(size, switches.conv_width, dtype=dtype) for _ in range(3)
        )
        self.A_log = nn.Parameter(torch.empty(1, 1, num_heads, 1, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(size, dtype=torch.float32))
        self.o_norm = GatedRMSNorm(switches.value_dim, eps=norm_eps, dtype=dtype, sigmoid=True)
        self.o_proj = Linear(size, hidden_size, dtype=dtype)

    def conv_weights(self) -> Sequence[Tensor]:
        return self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight

    def forward(self, x_TD: Tensor, kv_cache: PagedKVCache, rows: StateRows) -> Tensor:
        heads, rank = self.num_heads, self.switches.key_dim
        qkv_THX = by_head(self.qkv_proj(x_TD).chunk(3, dim=-1), num_heads=heads)
        forget_TX, gate_TX, b_TH = self.gates_proj(x_TD).split([rank, rank, heads], dim=-1)
        forget_THK = self.f_b_proj(forget_TX).unflatten(-1, (heads, -1))
        log_decay_THK = log_decays(forget_THK, self.A_log.view(heads, 1), self.dt_bias.view(heads, -1))
        beta_TH1 = correction_rates(b_TH.unsqueeze(-1))
        out_TH1K = self.mix(qkv_THX, log_decay_THK.unsqueeze(2), beta_TH1, kv_cache, rows)
        gate_THK = self.g_b_proj(gate_TX).unflatten(-1, (heads, -1))
        out_TD: Tensor = self.o_proj(self.o_norm(out_TH1K.squeeze(2), gate_THK).flatten(1))
        return out_TD


class KimiLinearLayer(ParallelModule):
    def __init__(
        self, config: ModelConfig, mla: MLAConfig, *, layer_index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        super().__init__()
        switches, recurrent = config.switches, config.recurrent
        assert isinstance(switches, DeltaSwitches)
        assert recurrent is not None
        size, eps = config.hidden_size, config.norm_eps
        place = config.cache_layer(layer_index)
        self.self_attn: KimiDeltaAttention | DeepseekAttention
        if recurrent.layers[layer_index]:
            self.self_attn = KimiDeltaAttention(
                size, switches, num_heads=recurrent.num_heads, layer_index=place, norm_eps=eps, dtype=dtype
            )
        else:
            self.self_attn = DeepseekAttention(
                size,
                mla,
                scale=config.attention_scale,
                layer_index=place,
                backend=backend,
                dtype=dtype,
                selection=Selection(),
            )
        self.input_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        if config.moe is not None and config.moe.layers[layer_index]:
            self.mlp: nn.Module = MoE(size, config.moe, dtype=dtype)
        else:
            self.mlp = GatedMLP(size, config.intermediate_size, dtype=dtype, bias=config.mlp_bias)

    def forward(
        self,
        stream_TD: Tensor,
        update_TD: Tensor | None,
        rotation: Rotation,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        rows: StateRows,
    ) -> Tensor:
        """Does what `DecoderLayer.forward` does."""
        normed_TD = self.input_layernorm.add_and_norm(stream_TD, update_TD)
        if isinstance(self.self_attn, KimiDeltaAttention):
            mixed_TD = self.self_attn(normed_TD, kv_cache, rows)
        else:
            mixed_TD = self.self_attn(normed_TD, rotation, kv_cache, metadata)
        normed_TD = self.post_attention_layernorm.add_and_norm(stream_TD, self.parallel.all_reduce(mixed_TD))
        return self.parallel.all_reduce(self.mlp(normed_TD))


class KimiLinearForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        mla = config.attention
        assert isinstance(mla, MLAConfig)
        layers = [
            KimiLinearLayer(config, mla, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        super().__init__(config, layers, dtype=dtype)
        self.rotary_pairs = mla.qk_rope_head_dim // 2

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, context: StepContext) -> Tensor:
        del positions_T
        assert context.states is not None
        assert isinstance(self.model.norm, RMSNorm)
        stream_TD: Tensor = self.model.embed_tokens(token_ids_T)
        # Latent attention does not rotate; positions come from the layers with states.
        cos_TP = torch.ones(len(stream_TD), self.rotary_pairs, dtype=torch.float32, device=stream_TD.device)
        rotation = Rotation(cos_TP, torch.zeros_like(cos_TP), interleaved=False)
        update_TD: Tensor | None = None
        for layer in self.model.layers:
            update_TD = layer(stream_TD, update_TD, rotation, kv_cache, context.metadata, context.states)
        return self.model.norm.add_and_norm(stream_TD, update_TD)
