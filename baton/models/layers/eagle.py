"""An EAGLE-3 head, which drafts tokens for a model from hidden states of three of its layers (arXiv 2503.01840).

At position i it reads those states after token i and the embedding of token i + 1, and predicts token i + 2. Its KV is
the part `draft` of the cache, as an MTP layer's is (`baton.models.layers.mtp`). For further tokens its own hidden state
takes the place of the model's.

This module owns the head's computation. Ranks split its layer as they split the model's; the projection `fc` and the
head's small vocabulary are whole on every rank, so that drafting gathers nothing. Shapes: T token, D hidden channel, R
row, V vocabulary, W the head's vocabulary.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attention.backend import AttentionBackend
from attention.metadata import AttentionMetadata
from attention.rotation import Rotation
from baton.kvcache.cache import PagedKVCache
from baton.models.config.model_config import EagleConfig
from baton.models.layers.embedding import Embedding
from baton.models.layers.linear import Linear
from baton.models.layers.mlp import GatedMLP
from baton.models.layers.norms import RMSNorm
from baton.models.layers.parallel import ParallelModule, TensorParallel, sum_now
from baton.models.layers.rotary import Rotary


class EagleLayer(ParallelModule):
    """Llama's layer, whose attention reads the embedding and the state side by side.

    Args:
        attention: takes inputs of twice the hidden size.
    """

    def __init__(self, head: EagleConfig, attention: nn.Module, *, dtype: torch.dtype) -> None:
        super().__init__()
        config, eps = head.layer, head.layer.norm_eps
        self.norm_before_residual = head.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, eps=eps, dtype=dtype)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=eps, dtype=dtype)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=eps, dtype=dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, dtype=dtype, bias=config.mlp_bias)

    def forward(
        self,
        embedded_TD: Tensor,
        states_TD: Tensor,
        rotation: Rotation,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        normed_TD = self.hidden_norm(states_TD)
        joined_TX = torch.cat((self.input_layernorm(embedded_TD), normed_TD), dim=-1)
        stream_TD = (normed_TD if self.norm_before_residual else states_TD).clone()
        attended_TD = self.parallel.all_reduce(self.self_attn(joined_TX, rotation, kv_cache, metadata))
        normed_TD = self.post_attention_layernorm.add_and_norm(stream_TD, attended_TD)
        return stream_TD.add_(self.parallel.all_reduce(self.mlp(normed_TD)))


class EagleHead(nn.Module):
    """One head. Module paths equal the tensor names of its checkpoint.

    Args:
        head: of this rank, if several ranks compute the head together.
        attention: as for `EagleLayer`; the first layer of the head's cache.
        vocab_size: of the whole model.

    Attributes:
        embed_tokens: None: the model's embedding is used.
        backend: computes the head's attention, whose heads and features may differ from the model's.
        d2t: int64 [W], what to add to a token of the head to get the model's token; None: nothing.
        tokens_W: int64, the model's token for each token of the head; None: the same.
    """

    d2t: Tensor | None
    tokens_W: Tensor | None

    def __init__(
        self,
        head: EagleConfig,
        attention: nn.Module,
        *,
        backend: AttentionBackend,
        vocab_size: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        config = head.layer
        assert config.rope is not None, "Llama's layer has a rotary embedding"
        size = config.hidden_size
        self.head, self.backend, self.vocab_size = head, backend, vocab_size
        self.rotary = Rotary(config.rope)
        self.embed_tokens = Embedding(config.vocab_size, size, dtype=dtype) if head.own_embedding else None
        self.fc = Linear(len(head.reads) * size, size, dtype=dtype)
        self.midlayer = EagleLayer(head, attention, dtype=dtype)
        self.norm = RMSNorm(size, eps=config.norm_eps, dtype=dtype)
        self.lm_head = Linear(size, head.draft_vocab_size, dtype=dtype)
        d2t = torch.zeros(head.draft_vocab_size, dtype=torch.int64) if head.maps_tokens else None
        self.register_buffer("d2t", d2t, persistent=False)
        self.register_buffer("tokens_W", None, persistent=False)

    def join(self, parallel: TensorParallel) -> None:
        """Makes this head, built from one rank's config, a part of the head that all ranks compute together."""
        for module in self.modules():
            if isinstance(module, ParallelModule):
                module.parallel = parallel

    def finish(self) -> None:
        """Prepares the head after its tensors are loaded."""
        if self.d2t is not None:
            self.tokens_W = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def forward(
        self,
        embedded_TD: Tensor,
        states_TD: Tensor,
        positions_T: Tensor,
        kv_cache: PagedKVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Returns the head's hidden states [T,D]: `compute_logits` turns them into logits, and a further token is
        drafted from them. Writes the head's KV.

        Args:
            embedded_TD: the embedding of each position's next token.
            states_TD: what `combine` returned for the positions, or hidden states of the head.
            kv_cache: the head's own.
        """
        out_TD: Tensor = self.midlayer(embedded_TD, states_TD, self.rotary(positions_T), kv_cache, metadata)
        return out_TD

    def combine(self, read: list[Tensor]) -> Tensor:
        """Projects the hidden states [T,D] of the model's layers to the head's states [T,D]."""
        states_TD: Tensor = self.fc(torch.cat(read, dim=-1))
        return states_TD

    def compute_logits(self, states_RD: Tensor) -> Tensor:
        """Returns logits [R,V] in float32; tokens that the head cannot draft have -inf."""
        logits_RW: Tensor = self.lm_head(self.norm(states_RD)).float()
        if self.tokens_W is None:
            return logits_RW
        logits_RV = logits_RW.new_full((len(logits_RW), self.vocab_size), -torch.inf)
        return logits_RV.index_copy_(1, self.tokens_W, logits_RW)


class ReadStates:
    """Hooks that keep what some layers of a model read: the residual stream with the update of the layer before.

    Args:
        layers: each takes the stream and the update first. The stream is changed in place, so it is copied.
        reads: the layers whose inputs are kept.
    """

    def __init__(self, layers: nn.ModuleList, reads: tuple[int, ...]) -> None:
        self._read: list[Tensor | None] = [None] * len(reads)
        for place, index in enumerate(reads):
            layers[index].register_forward_pre_hook(partial(self._keep, place))

    def take(self) -> list[Tensor]:
        """Returns the states of the forward that has just run, and forgets them."""
        read = [state for state in self._read if state is not None]
        assert len(read) == len(self._read), "a forward runs all layers"
        self._read = [None] * len(read)
        return read

    def _keep(self, place: int, _: nn.Module, args: tuple[Any, ...]) -> None:
        stream_TD, update_TD = args[:2]
        self._read[place] = stream_TD.clone() if update_TD is None else stream_TD + sum_now(update_TD)
