"""What differs from Llama in the families that share its file. Each switch has one meaning and no family's name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LlamaSwitches:
    """Attributes:
    embedding_multiplier, residual_multiplier, logits_multiplier: factors of the embeddings, of what each half of a
        layer adds to the residual stream, and of the logits.
    fused_tensors: checkpoints keep queries, keys and values in one tensor, and gate and up in one.
    """

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    fused_tensors: bool = False
