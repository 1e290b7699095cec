"""The options in which families that share Llama's file differ from it. Each has one meaning and no family's name."""

from dataclasses import dataclass
from enum import StrEnum


class Norms(StrEnum):
    """The places of a layer's norms: before each half, after each half, or around each. SHARED is one norm before both
    halves, which have the same input."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    SHARED = "shared"


@dataclass(frozen=True)
class QueryGrowth:
    """The growth of queries at later positions: a factor of 1 + beta * log(1 + floor(position / tokens))."""

    beta: float
    tokens: int


@dataclass(frozen=True)
class LlamaSwitches:
    """The options in which a model differs from Llama.

    Attributes:
        norms: the places of each layer's norms. SHARED norms are layer norms without bias, and so is the model's last
            norm.
        xielu_mlp: MLPs have no gate and apply xIELU between their two products.
        squared_relu_mlp: MLPs have no gate and apply the square of a ReLU between their two products.
        query_growth: growth of queries with position; None: they do not grow.
        embedding_multiplier, residual_multiplier, logits_multiplier: factors of the embeddings, of each half's update
            to the residual stream, and of the logits.
        stacked_experts: checkpoints have all experts of a layer in two tensors, inputs first.
        in_one_tensor: which of "qkv_proj" and "gate_up_proj" checkpoints keep in one tensor of that name.
    """

    norms: Norms = Norms.BEFORE
    xielu_mlp: bool = False
    query_growth: QueryGrowth | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    in_one_tensor: tuple[str, ...] = ()
    stacked_experts: bool = False
    squared_relu_mlp: bool = False
