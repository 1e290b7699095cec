"""Gemma 1, Gemma-2, the text model of Gemma-3, and VaultGemma: scaled embeddings, and norms with weights stored minus
1.

Gemma-2 and Gemma-3 also have norms after both halves of a layer. The attention is Llama's. Gemma-2 and VaultGemma cap
its scores and have windows in some layers; Gemma-3 has norms on queries and keys, and rotates them faster in layers
with a window. Shapes: T token, D hidden channel.
"""

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from attention.backend import AttentionBackend
from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.families.dense.gemma_config import NormsBefore
from baton.models.families.dense.llama import LlamaAttention
from baton.models.kernels.quantized.rows import QuantizedRows
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.mlp import GatedMLP, gelu_tanh_and_multiply
from baton.models.layers.norms import RMSNorm
from baton.models.layers.parallel import ParallelModule
from baton.models.layers.rotary import Rotary
from baton.models.layers.step_context import StepContext


class GemmaRMSNorm(RMSNorm):
    """An RMS norm whose weights are stored minus 1. The 1 is added in float32, which loses no digit."""

    weight_offset: ClassVar[int] = 1

    def _in_torch(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).to(x_TD.dtype)


class GemmaLayer(ParallelModule):
    """One layer of Gemma. Norms have their checkpoint names, so the norm before the MLP has one of two names."""

    def __init__(
        self, config: ModelConfig, gqa: GQAConfig, *, layer_index: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.slides = gqa.sliding_windows[layer_index] is not None
        self.input_layernorm = GemmaRMSNorm(size, eps=eps, dtype=dtype)
        self.self_attn = LlamaAttention(
            size, gqa, layer_index=layer_index, norm_eps=eps, backend=backend, dtype=dtype, norm=GemmaRMSNorm
        )
        before = config.switches if isinstance(config.switches, NormsBefore) else None
        self.before_mlp = "pre_feedforward_layernorm" if before is None else before.mlp_norm
        self.after_attention = None if before else "post_attention_layernorm"
        self.after_mlp = None if before else "post_feedforward_layernorm"
        for name in filter(None, (self.before_mlp, self.after_attention, self.after_mlp)):
            self.add_module(name, GemmaRMSNorm(size, eps=eps, dtype=dtype))
        self.mlp = GatedMLP(size, config.intermediate_size, dtype=dtype, activate=gelu_tanh_and_multiply)

    def norm(self, name: str | None) -> GemmaRMSNorm | None:
        return None if name is None else cast(GemmaRMSNorm, self.get_submodule(name))

    def forward(
        self,
        normed: Tensor | QuantizedRows,
        stream_TD: Tensor,
        rotation: Rotation,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
        *,
        next_norm: GemmaRMSNorm,
        next_reader: nn.Module | None,
    ) -> Tensor | QuantizedRows:
        """Adds both halves of the layer to the stream in place; returns `next_norm` of the stream.

        Args:
            normed: this layer's first norm of the stream, for its attention.
            next_reader: the only module that reads the result; None: several do.
        """
        attended_TD = self.parallel.all_reduce(self.self_attn(normed, rotation, kv_cache, metadata))
        before_mlp = self.norm(self.before_mlp)
        assert before_mlp is not None
        normed = before_mlp.add_and_norm_for(
            self.mlp, stream_TD, attended_TD, update_norm=self.norm(self.after_attention)
        )
        out_TD = self.parallel.all_reduce(self.mlp(normed))
        return next_norm.add_and_norm_for(next_reader, stream_TD, out_TD, update_norm=self.norm(self.after_mlp))


class GemmaForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, *, backend: AttentionBackend, dtype: torch.dtype) -> None:
        gqa = config.attention
        assert isinstance(gqa, GQAConfig)
        layers = [
            GemmaLayer(config, gqa, layer_index=index, backend=backend, dtype=dtype)
            for index in range(config.num_layers)
        ]
        norm = GemmaRMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        super().__init__(config, layers, dtype=dtype, norm=norm)
        self.local_rotary = None if config.local_rope is None else Rotary(config.local_rope)
        # NOTE: rounded to the model's dtype, as in training: 55.5, not 55.4256, for 3072 channels in bfloat16.
        self.embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=dtype, device="cpu").item()

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, context: StepContext) -> Tensor:
        assert self.rotary is not None
        rotation: Rotation = self.rotary(positions_T)
        local_rotation = rotation if self.local_rotary is None else self.local_rotary(positions_T)
        stream_TD: Tensor = self.model.embed_tokens(token_ids_T) * self.embedding_scale
        norms: list[Any] = [*(layer.input_layernorm for layer in self.model.layers), self.model.norm]
        readers: list[Any] = [*(layer.self_attn for layer in self.model.layers), None]
        normed = norms[0].add_and_norm_for(readers[0], stream_TD, None)
        for layer, norm, reader in zip(self.model.layers, norms[1:], readers[1:], strict=True):
            turns = local_rotation if layer.slides else rotation
            normed = layer(normed, stream_TD, turns, kv_cache, context.metadata, next_norm=norm, next_reader=reader)
        assert isinstance(normed, Tensor), "several modules read it"
        return normed
