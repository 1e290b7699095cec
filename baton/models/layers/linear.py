"""Linear layers: one layer of a checkpoint, or several that read the same input and are computed as one.

Parameters are allocated but not initialized; the loader fills every one.
"""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from baton.models.kernels.quantized.rows import RowFormat
from baton.models.layers.row_reader import RowReader

# x, weight [out, in], bias [out]: x @ weight.T + bias
Multiply: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Linear(nn.Linear, RowReader):
    """A linear layer that draws no initial weights.

    Attributes:
        multiply: computes `x @ weight.T + bias`; replaced where a product must not depend on the batch.
        has_adapters: whether products of adapters are added to its result (`baton.models.adapters.bank`).
    """

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=dtype)
        self.multiply: Multiply = linear
        self.has_adapters = False

    def forward(self, input: Tensor) -> Tensor:
        return self.multiply(input, self.weight, self.bias)

    def row_format(self, num_tokens: int) -> RowFormat | None:  # noqa: ARG002 (of quantized layers)
        return None

    def reset_parameters(self) -> None:
        """Does nothing: drawing billions of numbers, which loading overwrites, takes minutes."""


class InputsFirstLinear(Linear):
    """A linear layer whose weight is [in, out] in the checkpoint, as in GPT-2."""

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (tensor name, relative to this layer; the memory that it fills)."""
        for name, parameter in self.named_parameters():
            yield name, parameter.data.t() if name == "weight" else parameter.data


class FusedLinear(Linear):
    """Several of a checkpoint's linear layers that read the same input, computed as one.

    Args:
        parts: (name in the checkpoint, output features) of each, in the order of the output.
    """

    def __init__(
        self, in_features: int, parts: tuple[tuple[str, int], ...], *, dtype: torch.dtype, bias: bool = False
    ) -> None:
        super().__init__(in_features, sum(rows for _, rows in parts), dtype=dtype, bias=bias)
        self.parts = parts

    def keep_in_one(self, name: str) -> None:
        """Reads all parts from one tensor of that name, for checkpoints that store them so."""
        self.parts = ((name, self.out_features),)

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (checkpoint's tensor name, relative to this layer's parent; the rows of this layer that it fills)."""
        sizes = [rows for _, rows in self.parts]
        for parameter_name, parameter in self.named_parameters():
            for (part, _), view in zip(self.parts, torch.split(parameter.data, sizes), strict=True):
                yield f"{part}.{parameter_name}", view
