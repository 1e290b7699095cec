"""A decoder-only language model around one family's layers: embedding, layers, last norm, head.

Knows no family and no request. Shapes: T token of the batch, D hidden channel, R row that wants logits, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from attention.cache import PagedKVCache
from attention.metadata import AttentionMetadata
from models.config import ModelConfig
from models.layers import Embedding, Linear, RMSNorm
from models.rotary import Rotary


class Decoder(nn.Module):
    """What checkpoints keep under `model.`."""

    def __init__(self, config: ModelConfig, layers: Sequence[nn.Module], *, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)


class CausalLM(nn.Module):
    """Module paths equal the tensor names of checkpoints, apart from `FusedLinear` and `Experts`, which name theirs."""

    def __init__(self, config: ModelConfig, layers: Sequence[nn.Module], *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, layers, dtype=dtype)
        self.rotary = Rotary(config.rope, max_positions=config.max_context_tokens)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size, dtype=dtype)

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, kv_cache: PagedKVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Hidden states [T,D] of a flat batch; writes the batch's KV into `kv_cache`.

        Args:
            positions_T: below `config.max_context_tokens`.
            metadata: what the attention backend that the model was loaded with planned for this batch.
        """
        hidden_TD: Tensor = self.model.embed_tokens(token_ids_T)
        rotation = self.rotary(positions_T)
        for layer in self.model.layers:
            hidden_TD = layer(hidden_TD, rotation, kv_cache, metadata)
        out_TD: Tensor = self.model.norm(hidden_TD)
        return out_TD

    def compute_logits(self, hidden_RD: Tensor) -> Tensor:
        """Logits [R,V], float32, of the rows that are to be sampled."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return linear(hidden_RD, head.weight).float()
