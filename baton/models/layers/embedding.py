"""The token embedding, which also serves as the head of models that tie the two. Shapes: T token, D hidden channel."""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from baton.models.layers.linear import Multiply
from baton.models.layers.token_exchange import ExchangingModule


class Embedding(ExchangingModule):
    """The token embedding. Every rank has the same number of rows, for consecutive ids."""

    def __init__(self, num_embeddings: int, size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, size, dtype=dtype))
        self.multiply: Multiply = linear

    def forward(self, ids_T: Tensor) -> Tensor:
        if self.parallel.size == 1:
            return embedding(ids_T, self.weight)
        rows_T = ids_T - self.parallel.rank * len(self.weight)
        elsewhere_T = (rows_T < 0) | (rows_T >= len(self.weight))
        rows_TD = embedding(rows_T.masked_fill_(elsewhere_T, 0), self.weight)
        return self.sum_of_ranks(rows_TD.masked_fill_(elsewhere_T.unsqueeze(-1), 0))

    def as_head(self, x_TD: Tensor) -> Tensor:
        """Returns logits of this rank's ids, for a model whose head is tied to its embedding."""
        return self.multiply(x_TD, self.weight, None)
