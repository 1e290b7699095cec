"""Falcon-H1: Mamba-2 and attention read the same input in each layer (arXiv 2507.22448), and an MLP follows.

Shapes: T token, D hidden channel, I channel of an MLP.
"""

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend
from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.families.hybrid.falcon_h1_config import FalconH1Switches
from baton.models.families.hybrid.granite_hybrid import BambaForCausalLM
from baton.models.families.hybrid.mamba_parts import HybridAttention, Mamba2Mixer
from baton.models.kernels.recurrent.state_rows import StateRows
from baton.models.layers.mlp import GatedMLP, silu_and_multiply
from baton.models.layers.norms import RMSNorm
from baton.models.layers.parallel import ParallelModule


class MultipliedSilu:
    """silu of a multiple of the first half of the channels, times the second half. The argument is overwritten."""

    def __init__(self, multiplier: float) -> None:
        self.multiplier = multiplier

    def __call__(self, gate_up_TI: Tensor) -> Tensor:
        gate_up_TI.chunk(2, dim=-1)[0].mul_(self.multiplier)
        return silu_and_multiply(gate_up_TI)


class FalconH1Layer(ParallelModule):
    """One layer of Falcon-H1: Mamba-2 and attention side by side, then an MLP.

    Args:
        layer_index: index in the model. Every layer has a state and KV.
    """

    def __init__(
        self,
        config: ModelConfig,
        gqa: GQAConfig,
        mlp: nn.Module,
        *,
        layer_index: int,
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        switches, recurrent = config.switches, config.recurrent
        assert isinstance(switches, FalconH1Switches)
        assert recurrent is not None
        self.switches = switches
        size, eps = config.hidden_size, config.norm_eps
        state, kv = config.cache_layer(layer_index), config.kv_layer(layer_index)
        self.mamba = Mamba2Mixer(size, switches, recurrent, layer_index=state, norm_eps=eps, dtype=dtype)
        self.self_attn = HybridAttention(size, gqa, layer_index=kv, norm_eps=eps, backend=backend, dtype=dtype)
        self.input_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(size, eps=eps, dtype=dtype)
        self.mlp = mlp

    def forward(
        self,
        stream_TD: Tensor,
        update_TD: Tensor | None,
        rotation: Rotation | None,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        rows: StateRows,
    ) -> Tensor:
        """Does what `DecoderLayer.forward` does."""
        read, attended = self.switches.attention_multipliers
        normed_TD = self.input_layernorm.add_and_norm(stream_TD, update_TD)
        attended_TD = self.self_attn(_times(normed_TD, read), rotation, kv_cache, metadata)
        mixed_TD = self.mamba(normed_TD, kv_cache, rows)
        part_TD = _times(mixed_TD, self.switches.mixer_multiplier) + _times(attended_TD, attended)
        normed_TD = self.post_attention_layernorm.add_and_norm(stream_TD, self.parallel.all_reduce(part_TD))
        return _times(self.parallel.all_reduce(self.mlp(normed_TD)), self.switches.mlp_multipliers[1])


def _times(x: Tensor, multiplier: float) -> Tensor:
    return x if multiplier == 1.0 else x * multiplier


class FalconH1ForCausalLM(BambaForCausalLM):
    """Falcon-H1 with Bamba's names and residual stream."""

    @classmethod
    def make_layer(
        cls, config: ModelConfig, gqa: GQAConfig, *, layer_index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> ParallelModule:
        mlp = cls.make_mlp(config, dtype)
        return FalconH1Layer(config, gqa, mlp, layer_index=layer_index, backend=backend, dtype=dtype)

    @staticmethod
    def make_mlp(config: ModelConfig, dtype: torch.dtype) -> nn.Module:
        assert isinstance(config.switches, FalconH1Switches)
        gates, _ = config.switches.mlp_multipliers
        activate = silu_and_multiply if gates == 1.0 else MultipliedSilu(gates)
        size = config.intermediate_size
        return GatedMLP(config.hidden_size, size, dtype=dtype, bias=config.mlp_bias, activate=activate)
