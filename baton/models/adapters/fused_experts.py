"""PEFT's adapters of tensors that hold all experts of a layer (`target_parameters`), as those of each expert's layers.

PEFT saves one pair of matrices for such a tensor, with the ranks of all experts in one axis: expert by expert in A,
rank by rank in B. An adapter of both tensors of a layer has one pair under the name of the base of the other. Their
shapes say which tensor is meant. Legend: E expert, R rank, I input, O output.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

_MODULE = re.compile(r"(?P<experts>.+\.experts)(\.base_layer)*")


def experts_of(name: str) -> str | None:
    """The module of experts that an adapter's layer of this name is for; None: it is for no such module."""
    matched = _MODULE.fullmatch(name)
    return None if matched is None else matched["experts"]


@dataclass(frozen=True)
class FusedExperts:
    """The experts of one layer of the model.

    Args:
        size, inner: channels of the model and between an expert's two products.
    """

    count: int
    size: int
    inner: int

    def parameter(self, channels: tuple[int, ...]) -> str | None:
        """The tensor that a pair of matrices with these inputs and outputs is for; None: neither."""
        known: dict[tuple[int, ...], str] = {
            (self.size, 2 * self.inner): "gate_up_proj",
            (self.inner, self.size): "down_proj",
        }
        return known.get(channels)

    def split(self, parameter: str, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(Name after that of the experts, A [R, I], B [O, R]) of each expert's layers."""
        a_ERI = a.unflatten(0, (self.count, -1))
        b_ORE = b.unflatten(1, (-1, self.count))
        for expert in range(self.count):
            b_OR = b_ORE[:, :, expert]
            parts: Mapping[str, Tensor] = {"down_proj": b_OR}
            if parameter == "gate_up_proj":
                parts = {"gate_proj": b_OR[: self.inner], "up_proj": b_OR[self.inner :]}
            yield from ((f"{expert}.{name}", a_ERI[expert], part) for name, part in parts.items())
