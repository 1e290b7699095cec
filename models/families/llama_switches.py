"""What differs from Llama in the families that share its file. Each switch has one meaning and no family's name."""

from dataclasses import dataclass
from enum import StrEnum


class Norms(StrEnum):
    """Where a layer's norms are: before each half, or after each half."""

    BEFORE = "before"
    AFTER = "after"


@dataclass(frozen=True)
class QueryGrowth:
    """Queries at later positions are larger: by 1 + beta * log(1 + floor(position / tokens))."""

    beta: float
    tokens: int


@dataclass(frozen=True)
class LlamaSwitches:
    """Attributes:
    norms: of each layer.
    query_growth: None: queries have the same size everywhere.
    embedding_multiplier, residual_multiplier, logits_multiplier: factors of the embeddings, of what each half of a
        layer adds to the residual stream, and of the logits.
    fused_tensors: checkpoints keep queries, keys and values in one tensor, and gate and up in one.
    """

    norms: Norms = Norms.BEFORE
    query_growth: QueryGrowth | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    fused_tensors: bool = False
