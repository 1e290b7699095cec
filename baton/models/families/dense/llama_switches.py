"""What differs from Llama in the families that share its file. Each switch has one meaning and no family's name."""

from dataclasses import dataclass
from enum import StrEnum


class Norms(StrEnum):
    """Where a layer's norms are: before each half, after each half, or around each. SHARED: one before both halves,
    which work on the same input."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    SHARED = "shared"


@dataclass(frozen=True)
class QueryGrowth:
    """Queries at later positions are larger: by 1 + beta * log(1 + floor(position / tokens))."""

    beta: float
    tokens: int


@dataclass(frozen=True)
class LlamaSwitches:
    """How a model differs from Llama.

    Attributes:
        norms: of each layer. Norms of SHARED are layer norms without bias, and so is the last one of the model.
        xielu_mlp: MLPs have no gate, and xIELU between their two products.
        squared_relu_mlp: MLPs have no gate, and the square of a ReLU between their two products.
        query_growth: None: queries have the same size everywhere.
        embedding_multiplier, residual_multiplier, logits_multiplier: factors of the embeddings, of what each half of a
            layer adds to the residual stream, and of the logits.
        stacked_experts: checkpoints have all experts of a layer in two tensors, inputs first.
        in_one_tensor: of "qkv_proj" and "gate_up_proj", those whose parts checkpoints keep in one tensor of that name.
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
