"""Finishes pooled values as the checkpoint's own files say: cut, normalized, turned into scores. Pure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton.core.errors import InvalidRequest
from baton.models.config.pooling import EmbeddingConfig, ScoreConfig


def check_dimensions(dimensions: int | None, config: EmbeddingConfig, hidden_size: int) -> None:
    """Raises InvalidRequest unless vectors can have this length."""
    if dimensions is None:
        return
    allowed = config.matryoshka_dimensions
    if dimensions <= hidden_size and (not allowed or dimensions in (*allowed, hidden_size)):
        return
    raise InvalidRequest(
        f"dimensions is {dimensions}, and the model's vectors have {hidden_size}",
        field="dimensions",
        value=dimensions,
        allowed=tuple(map(str, allowed)) or (f"1 to {hidden_size}",),
    )


def finished(
    vectors: Sequence[NDArray[np.float32]], config: EmbeddingConfig, dimensions: int | None
) -> NDArray[np.float32]:
    """The vectors cut and normalized, [inputs, dimensions]. A cut vector is normalized if the whole one would be."""
    found = np.stack(vectors)[:, :dimensions]
    if config.normalize:
        found = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
    return found.astype(np.float32)


def scores_of(outputs: NDArray[np.float64], config: ScoreConfig) -> NDArray[np.float64]:
    """The scores of pairs whose outputs are [pairs, 1], or [pairs, 2] with the logits of yes and no."""
    found = outputs[:, 0] - (outputs[:, 1] if outputs.shape[1] == 2 else 0.0)
    if not config.sigmoid:
        return found
    return np.exp(-np.logaddexp(0.0, -found))  # a sigmoid that cannot overflow
