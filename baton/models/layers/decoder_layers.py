"""Decoder layers with norms in other places than Llama's: after both halves, around each, or one before both together.

`baton.models.layers.causal_lm.DecoderLayer` is Llama's. All receive an attention and an MLP that return a rank's part
of a sum, and share one signature: a layer adds the previous layer's update to the residual stream, and returns its own
last update. Shapes: T token, D hidden channel.
"""

from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.layers.norms import CenteredNorm, RMSNorm
from baton.models.layers.parallel import ParallelModule


class _Block(ParallelModule):
    """Base of the layers below."""

    def __init__(self, self_attn: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.self_attn, self.mlp = self_attn, mlp

    @abstractmethod
    def forward(
        self,
        stream_TD: Tensor,
        update_TD: Tensor | None,
        rotation: Rotation,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor: ...


class NormsAfter(_Block):
    """Computes x + norm(attention(x)), then x + norm(mlp(x)), as in OLMo-2."""

    def __init__(self, self_attn: nn.Module, mlp: nn.Module, make_norm: Callable[[], RMSNorm]) -> None:
        super().__init__(self_attn, mlp)
        self.post_attention_layernorm = make_norm()
        self.post_feedforward_layernorm = make_norm()

    def forward(
        self,
        stream_TD: Tensor,
        update_TD: Tensor | None,
        rotation: Rotation,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        if update_TD is not None:
            stream_TD.add_(update_TD)
        attended_TD = self.parallel.all_reduce(self.self_attn(stream_TD, rotation, kv_cache, metadata))
        stream_TD.add_(self.post_attention_layernorm(attended_TD))
        out_TD: Tensor = self.post_feedforward_layernorm(self.parallel.all_reduce(self.mlp(stream_TD)))
        return out_TD


class NormsAround(_Block):
    """Computes x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), as in GLM-4."""

    def __init__(self, self_attn: nn.Module, mlp: nn.Module, make_norm: Callable[[], RMSNorm]) -> None:
        super().__init__(self_attn, mlp)
        self.input_layernorm = make_norm()
        self.post_self_attn_layernorm = make_norm()
        self.post_attention_layernorm = make_norm()
        self.post_mlp_layernorm = make_norm()

    def forward(
        self,
        stream_TD: Tensor,
        update_TD: Tensor | None,
        rotation: Rotation,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        normed = self.input_layernorm.add_and_norm_for(self.self_attn, stream_TD, update_TD)
        attended_TD = self.parallel.all_reduce_later(self.self_attn(normed, rotation, kv_cache, metadata))
        normed = self.post_attention_layernorm.add_and_norm_for(
            self.mlp, stream_TD, attended_TD, update_norm=self.post_self_attn_layernorm
        )
        out_TD: Tensor = self.post_mlp_layernorm(self.parallel.all_reduce(self.mlp(normed)))
        return out_TD


class ParallelHalves(_Block):
    """Computes x + attention(norm(x)) + mlp(norm(x)), as in Cohere, with one sum over ranks for both."""

    def __init__(self, self_attn: nn.Module, mlp: nn.Module, norm: CenteredNorm) -> None:
        super().__init__(self_attn, mlp)
        self.input_layernorm = norm

    def forward(
        self,
        stream_TD: Tensor,
        update_TD: Tensor | None,
        rotation: Rotation,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        normed_TD = self.input_layernorm.add_and_norm(stream_TD, update_TD)
        attended_TD = self.self_attn(normed_TD, rotation, kv_cache, metadata)
        return self.parallel.all_reduce(attended_TD + self.mlp(normed_TD))
