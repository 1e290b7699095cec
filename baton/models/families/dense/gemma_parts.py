"""The parts that Gemma 3n and Gemma 4 share: attention that reads earlier layers' keys and values in the last layers,
and an extra input of each layer from its own embedding.

Shapes: T token, D hidden channel, H query head, K kv head, X heads of queries, keys and values, C head channel,
L layer, P channel of a layer's input.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm

from attention.backend import AttentionBackend
from attention.layer import Attention
from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import GQAConfig
from baton.models.layers.elementwise import gelu
from baton.models.layers.linear import FusedLinear, Linear
from baton.models.layers.norms import RMSNorm
from baton.models.layers.parallel import ParallelModule


def norm_without_weight(x: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x ** 2) + eps) over the last axis, computed in float32 and rounded once."""
    return rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)


class SharingAttention(nn.Module):
    """Grouped-query attention with norms of queries, keys and values. Scores are not scaled.

    Args:
        before: the attentions of the layers before this one. A layer without keys and values reads those of one of
            them.
        values_are_keys: values are the keys before norm and rotation.
    """

    attend: Attention

    def __init__(
        self,
        hidden_size: int,
        gqa: GQAConfig,
        *,
        layer_index: int,
        before: Sequence["SharingAttention"],
        norm_eps: float,
        backend: AttentionBackend,
        dtype: torch.dtype,
        values_are_keys: bool = False,
    ) -> None:
        super().__init__()
        num_kv_heads, head_dim = gqa.heads_of(layer_index)
        source = gqa.kv_source(layer_index)
        owns = source == layer_index
        self.num_heads, self.num_kv_heads, self.head_dim = gqa.num_heads, num_kv_heads, head_dim
        self.norm_eps = norm_eps
        q_size, kv_size = gqa.num_heads * head_dim, num_kv_heads * head_dim
        parts = [("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)]
        parts = parts[: (2 if values_are_keys else 3) if owns else 1]
        self.qkv_proj = FusedLinear(hidden_size, tuple(parts), dtype=dtype, bias=gqa.qkv_bias)
        self.o_proj = Linear(q_size, hidden_size, dtype=dtype, bias=gqa.output_bias)
        self.q_norm = RMSNorm(head_dim, eps=norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(head_dim, eps=norm_eps, dtype=dtype) if owns else None
        self.attend = Attention(
            num_heads=gqa.num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=gqa.scale,
            layer_index=layer_index,
            backend=backend,
            sliding_window=gqa.sliding_windows[layer_index],
            kv_sharing_target=None if owns else before[source].attend,
        )

    def forward(self, x_TD: Tensor, rotation: Rotation, kv_cache: PagedKVCache, metadata: AttentionMetadata) -> Tensor:
        heads_TXC = self.qkv_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        q_THC = rotation.apply(_of_each_head(self.q_norm, heads_TXC[:, : self.num_heads]))
        k_TKC = v_TKC = None
        if self.k_norm is not None:
            k_TKC = heads_TXC[:, self.num_heads : self.num_heads + self.num_kv_heads]
            v_TKC = norm_without_weight(heads_TXC[:, -self.num_kv_heads :], self.norm_eps)
            k_TKC = rotation.apply(_of_each_head(self.k_norm, k_TKC))
        out_THC = self.attend(q_THC, k_TKC, v_TKC, kv_cache, metadata)
        out_TD: Tensor = self.o_proj(out_THC.flatten(1))
        return out_TD


def _of_each_head(norm: RMSNorm, x_TXC: Tensor) -> Tensor:
    normed: Tensor = norm(x_TXC.flatten(0, 1))
    return normed.view(x_TXC.shape)


class LayerInputs(nn.Module):
    """Computes the extra inputs of all layers: the mean, times sqrt(2), of an embedding of the token and a projection
    of the stream's first value. Every rank has all of it, because a sum over ranks would move more data than the
    layers' own sums.

    Module paths equal those in checkpoints after `model.`.

    Args:
        vocab_size: rows of this embedding. Tokens beyond it use the row of token 0.
    """

    def __init__(
        self, hidden_size: int, num_layers: int, size: int, *, vocab_size: int, norm_eps: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.size, self.vocab_size = size, vocab_size
        self.embed_tokens_per_layer = WholeEmbedding(vocab_size, num_layers * size, dtype=dtype)
        self.per_layer_model_projection = Linear(hidden_size, num_layers * size, dtype=dtype)
        self.per_layer_projection_norm = RMSNorm(size, eps=norm_eps, dtype=dtype)
        self.embedding_scale = rounded(size**0.5, dtype)
        self.projection_scale = rounded(hidden_size**-0.5, dtype)
        self.sum_scale = rounded(0.5**0.5, dtype)

    def forward(self, token_ids_T: Tensor, stream_TD: Tensor) -> Tensor:
        """Returns the inputs of all layers [T, L, P]."""
        known_T = token_ids_T.masked_fill(token_ids_T >= self.vocab_size, 0)
        embedded_TLP = self.embed_tokens_per_layer(known_T).unflatten(-1, (-1, self.size)) * self.embedding_scale
        projected_TLP = self.per_layer_model_projection(stream_TD).unflatten(-1, (-1, self.size))
        projected_TLP = _of_each_head(self.per_layer_projection_norm, projected_TLP * self.projection_scale)
        inputs_TLP: Tensor = (projected_TLP + embedded_TLP) * self.sum_scale
        return inputs_TLP


class WholeEmbedding(nn.Module):
    """An embedding that is whole on each rank."""

    def __init__(self, num_embeddings: int, size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, size, dtype=dtype))

    def forward(self, ids_T: Tensor) -> Tensor:
        return embedding(ids_T, self.weight)


class LayerWithInput(ParallelModule):
    """A layer that adds a product of its own extra input to the stream.

    Args:
        input_size: channels of the extra input; 0: there is none.
    """

    def __init__(self, hidden_size: int, input_size: int, *, norm_eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        if input_size:
            self.per_layer_input_gate = Linear(hidden_size, input_size, dtype=dtype)
            self.per_layer_projection = Linear(input_size, hidden_size, dtype=dtype)
            self.post_per_layer_input_norm = RMSNorm(hidden_size, eps=norm_eps, dtype=dtype)

    def of_input(self, stream_TD: Tensor, input_TP: Tensor) -> Tensor:
        gated_TP = gelu(self.per_layer_input_gate(stream_TD), approximate="tanh") * input_TP
        out_TD: Tensor = self.post_per_layer_input_norm(self.per_layer_projection(gated_TP))
        return out_TD


def rounded(value: float, dtype: torch.dtype) -> float:
    """Rounds the number to the model's dtype, as in training."""
    return torch.tensor(value, dtype=dtype, device="cpu").item()
