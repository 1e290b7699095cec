"""LongCat-Flash: layers of two latent attentions and two MLPs, with a mixture of experts next to the second half of
each layer (arXiv 2509.01322).

Some experts have no weights and return their input (`baton.models.layers.moe.moe`). Shapes: T token, D hidden channel.
"""

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend
from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import MLAConfig, ModelConfig
from baton.models.families.latent.deepseek import DeepseekAttention
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.indexer import Selection
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.moe.moe import MoE
from baton.models.layers.norms import RMSNorm
from baton.models.layers.parallel import ParallelModule


class LongcatLayer(ParallelModule):
    """One layer: attention and MLP, twice. The experts read the first MLP's input and are added with the second MLP's
    result, so nothing in between waits for them."""

    def __init__(
        self, config: ModelConfig, mla: MLAConfig, *, layer_index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert config.moe is not None
        size, each = config.hidden_size, config.attentions_per_layer

        def norms() -> nn.ModuleList:
            return nn.ModuleList(RMSNorm(size, eps=config.norm_eps, dtype=dtype) for _ in range(each))

        self.input_layernorm, self.post_attention_layernorm = norms(), norms()
        self.self_attn = nn.ModuleList(
            DeepseekAttention(
                size,
                mla,
                scale=config.attention_scale,
                layer_index=each * layer_index + index,
                backend=backend,
                dtype=dtype,
                selection=Selection(),
            )
            for index in range(each)
        )
        self.mlps = nn.ModuleList(GatedMLP(size, config.intermediate_size, dtype=dtype) for _ in range(each))
        self.mlp = MoE(size, config.moe, dtype=dtype)

    def forward(
        self,
        stream_TD: Tensor,
        update_TD: Tensor | None,
        rotation: Rotation,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Does what `DecoderLayer.forward` does."""
        attend = (rotation, kv_cache, metadata)
        normed_TD = self._attended(0, stream_TD, update_TD, *attend)
        experts_TD = self.mlp(normed_TD)
        update_TD = self.parallel.all_reduce(self.mlps[0](normed_TD))
        normed_TD = self._attended(1, stream_TD, update_TD, *attend)
        return self.parallel.all_reduce(self.mlps[1](normed_TD) + experts_TD)

    def _attended(
        self,
        index: int,
        stream_TD: Tensor,
        update_TD: Tensor | None,
        rotation: Rotation,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Adds the update and an attention's result to the stream; returns the input of the MLP that follows."""
        before, after = self.input_layernorm[index], self.post_attention_layernorm[index]
        assert isinstance(before, RMSNorm)
        assert isinstance(after, RMSNorm)
        normed_TD = before.add_and_norm(stream_TD, update_TD)
        attended_TD = self.self_attn[index](normed_TD, rotation, kv_cache, metadata)
        return after.add_and_norm(stream_TD, self.parallel.all_reduce(attended_TD))


class LongcatFlashForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        mla = config.attention
        assert isinstance(mla, MLAConfig)
        layers = [
            LongcatLayer(config, mla, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        super().__init__(config, layers, dtype=dtype)
