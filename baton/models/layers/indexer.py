"""The indexer of sparse attention (DeepSeek-V3.2): scores every token that a query sees and selects the best.

Its keys, one head per token, have a cache next to the KV cache. All ranks compute the whole indexer, so all select the
same tokens. The published code multiplies queries and keys by a Hadamard matrix before it rounds them to fp8. Without
both the products are the same, and as exact as the model's dtype. Shapes: T token, D hidden channel, X channel of the
queries' latent, H head of the indexer, C its channel.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from attention.backend import AttentionBackend, MLAMetadata, SparseMLABackend
from attention.kernels.rotary.turn import turn_heads
from attention.rotation import Rotation
from attention.sparse import NOTHING_SELECTED, Selected
from baton.core.errors import ConfigError
from baton.kvcache.access import store_latent
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import IndexConfig
from baton.models.layers.linear import Linear, Multiply
from baton.models.layers.norms import LayerNorm

# NOTE: the models were trained with this value, whatever their `rms_norm_eps`.
_KEY_NORM_EPS = 1e-6


@dataclass
class Selection:
    """The selection of the last layer with an indexer in the current step, shared by a model's layers."""

    keys: Selected = NOTHING_SELECTED


class HeadWeights(nn.Module):
    """The weight of each head of the indexer, in float32 for every model dtype and never quantized, like a router's
    logits.

    Attributes:
        multiply: as in `baton.models.layers.linear.Linear`.
    """

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, size, dtype=torch.float32))
        self.multiply: Multiply = linear

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.multiply(x_TD.float(), self.weight, None)


class Indexer(nn.Module):
    """The indexer of one layer.

    Raises:
        ConfigError: the backend cannot select tokens.
    """

    def __init__(
        self,
        hidden_size: int,
        q_lora_rank: int,
        index: IndexConfig,
        *,
        layer_index: int,
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        if not isinstance(backend, SparseMLABackend):
            raise ConfigError(
                f"{backend.capabilities.name} does not attend to selected tokens",
                field="attention_backend",
                value=backend.capabilities.name,
                cure="let the backend be selected for this model",
            )
        self.index, self.backend = index, backend
        self.cache_layer = index.cache_layer(layer_index)
        self.wq_b = Linear(q_lora_rank, index.num_heads * index.head_dim, dtype=dtype)
        self.wk = Linear(hidden_size, index.head_dim, dtype=dtype)
        self.k_norm = LayerNorm(index.head_dim, eps=_KEY_NORM_EPS, dtype=dtype)
        self.weights_proj = HeadWeights(hidden_size, index.num_heads)

    def forward(
        self, x_TD: Tensor, q_a_TX: Tensor, rotation: Rotation, kv_cache: PagedKVCache, metadata: MLAMetadata
    ) -> Selected:
        """Writes the new tokens' keys into the cache, then selects tokens for queries that do not attend to all they
        see.

        Args:
            q_a_TX: the latent of the queries, normed.
        """
        assert kv_cache.index is not None, "the cache's spec has no part for the index"
        rotation = replace(rotation, interleaved=self.index.interleaved)
        keys_layer = kv_cache.index.layer(self.cache_layer)
        k_TC = _turned(self.k_norm(self.wk(x_TD)).unsqueeze(1), rotation).squeeze(1)
        first, second = k_TC.chunk(2, dim=-1)
        store_latent(keys_layer, first, second, metadata.new_tokens)
        if metadata.sparse_decodes is None and metadata.sparse_prefills is None:
            return NOTHING_SELECTED
        q_THC = _turned(self.wq_b(q_a_TX).unflatten(-1, (self.index.num_heads, -1)), rotation)
        weights_TH = self.weights_proj(x_TD) * (self.index.num_heads * self.index.head_dim) ** -0.5
        chosen: list[Tensor | None] = []
        starts = (0, metadata.num_decode_tokens, metadata.num_actual_tokens)
        for queries, start, stop in zip(
            (metadata.sparse_decodes, metadata.sparse_prefills), starts[:-1], starts[1:], strict=True
        ):
            rows = slice(start, stop)
            chosen.append(
                None if queries is None else self.backend.select(q_THC[rows], weights_TH[rows], keys_layer, queries)
            )
        return Selected(*chosen)


def _turned(x_THC: Tensor, rotation: Rotation) -> Tensor:
    """Turns the heads, on a GPU in place."""
    if not x_THC.is_cuda:
        return rotation.apply(x_THC)
    turn_heads(x_THC, rotation)
    return x_THC
