"""Integer weights of 4 or 8 bits in 32-bit words: what is common to the publishers' packings. Free of torch.

A scheme says which tensors a linear layer has and how each lies along the weight's outputs and inputs. Shapes,
unpacking and the parts of tensor-parallel ranks follow from that. A weight is (number - zero) * scale.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from baton.models.config.quantization.fields import leaves_out

WORD_BITS = 32


class TensorRole(StrEnum):
    """What a stored tensor holds: numbers, their scales and zeros, each channel's group, the weight's shape."""

    NUMBERS = "numbers"
    SCALES = "scales"
    ZEROS = "zeros"
    GROUPS = "groups"
    SHAPE = "shape"


@dataclass(frozen=True)
class Axis:
    """The tensor's axis that runs along outputs or inputs of the weight.

    Attributes:
        per_entry: channels of the weight in one entry; None: all of them.
    """

    dim: int
    per_entry: int | None = 1


@dataclass(frozen=True)
class StoredPart:
    """One tensor of a quantized linear layer.

    Attributes:
        suffix: the tensor's name after the layer's.
        dtype: in the spelling of safetensors; "" for any of floats.
        outputs, inputs: None where the tensor does not run along them.
        packed_dim: the axis along which words hold several numbers, the lowest bits first.
        order: which of a word's numbers each of its places holds, where these are not in order.
        optional: some checkpoints have it.
    """

    suffix: str
    dtype: str
    outputs: Axis | None
    inputs: Axis | None
    packed_dim: int | None = None
    order: tuple[int, ...] = ()
    optional: bool = False

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Of a weight with so many outputs and inputs."""
        if self.outputs is None and self.inputs is None:
            return (2,)
        sizes = {
            axis.dim: 1 if axis.per_entry is None else -(-size // axis.per_entry)
            for axis, size in ((self.outputs, rows), (self.inputs, columns))
            if axis is not None
        }
        return tuple(sizes[dim] for dim in sorted(sizes))


@dataclass(frozen=True)
class PackedConfig(ABC):
    """Integers with a scale, and a zero where they are not symmetric, for each group of an output's inputs.

    Attributes:
        packing: the publisher's layout; each is a class of its own.
        group_size: inputs that share a scale; None: all.
        symmetric: the zero is the middle of the numbers.
        reordered: groups are not runs of inputs (act-order): a tensor has each input's group.
        unquantized: as in `Fp8Config`.
    """

    packing: Literal["gptq", "gptq_v2", "awq", "pack-quantized"]
    bits: Literal[4, 8]
    group_size: int | None
    symmetric: bool
    reordered: bool = False
    unquantized: tuple[str, ...] = ()

    @property
    @abstractmethod
    def tensors(self) -> Mapping[TensorRole, StoredPart]:
        """Of one linear layer."""

    @property
    def zeros_are_less_one(self) -> bool:
        """Whether stored zeros are one less than the zeros."""
        return False

    def covers(self, name: str) -> bool:
        """Whether the linear layer that checkpoints call `name` is packed. A checkpoint that has the layer's plain
        weight overrides this."""
        return name != "lm_head" and not leaves_out(self.unquantized, name)

    @property
    def per_word(self) -> int:
        return WORD_BITS // self.bits

    @property
    def weight_bytes(self) -> float:
        """Of one weight, scales and zeros left out."""
        return self.bits / 8

    @property
    def head_blocks(self) -> tuple[int, int]:
        """A rank's (outputs, inputs) are multiples of these, so that it holds whole words and whole groups."""
        outputs, inputs = 1, 1
        for stored in self.tensors.values():
            if stored.outputs is not None:
                outputs = math.lcm(outputs, stored.outputs.per_entry or 1)
            if stored.inputs is not None and not self.cut_whole(stored):
                inputs = math.lcm(inputs, stored.inputs.per_entry or 1)
        return outputs, inputs

    @property
    def channel_block(self) -> int | None:
        """Intermediate channels that stay together: outputs of one layer and inputs of the next."""
        return math.lcm(*self.head_blocks)

    def cut_whole(self, stored: StoredPart) -> bool:
        """Whether a rank holds all of the tensor along its inputs: scales and zeros, where groups are no runs."""
        return self.reordered and stored.inputs is not None and stored.inputs.per_entry == self.group_size

    def _group_axis(self, dim: int) -> Axis:
        """The axis of scales."""
        return Axis(dim, self.group_size)
