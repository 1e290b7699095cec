"""Integer weights of 4 or 8 bits in 32-bit words: the parts that all publishers' packings share. It imports no torch.

A scheme lists the tensors of a linear layer and how each runs along the weight's outputs and inputs. Shapes, unpacking
and the parts of tensor-parallel ranks follow from that. A weight is (number - zero) * scale.
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
    """The content of a stored tensor: numbers, scales, zeros, each channel's group, or the weight's shape."""

    NUMBERS = "numbers"
    SCALES = "scales"
    ZEROS = "zeros"
    GROUPS = "groups"
    SHAPE = "shape"


@dataclass(frozen=True)
class Axis:
    """An axis of a tensor that runs along the weight's outputs or inputs.

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
        dtype: in the spelling of safetensors; "" for any float.
        outputs, inputs: the axes along them; None if the tensor has no such axis.
        packed_dim: the axis along which words hold several numbers, lowest bits first.
        order: the number that each place of a word holds, if they are not in order.
        optional: only some checkpoints have the tensor.
    """

    suffix: str
    dtype: str
    outputs: Axis | None
    inputs: Axis | None
    packed_dim: int | None = None
    order: tuple[int, ...] = ()
    optional: bool = False

    def shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Returns the tensor's shape for a weight with `rows` outputs and `columns` inputs."""
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
    """A checkpoint with packed integers. Each group of an output's inputs has a scale, and a zero unless symmetric.

    Attributes:
        packing: name of the publisher's layout; each layout has its own class.
        group_size: inputs that share a scale; None: all.
        symmetric: the zero is the middle of the numbers.
        reordered: groups are not runs of inputs (act-order); a tensor holds each input's group.
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
        """Returns the tensors of one linear layer."""

    @property
    def zeros_are_less_one(self) -> bool:
        """Whether stored zeros are one less than the actual zeros."""
        return False

    def covers(self, name: str) -> bool:
        """Whether the linear layer that checkpoints call `name` is packed. If a checkpoint has the layer's plain
        weight, that overrides the result."""
        return name != "lm_head" and not leaves_out(self.unquantized, name)

    @property
    def per_word(self) -> int:
        return WORD_BITS // self.bits

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight, without scales and zeros."""
        return self.bits / 8

    @property
    def head_blocks(self) -> tuple[int, int]:
        """The numbers that a rank's (outputs, inputs) must be multiples of, so that it holds whole words and groups."""
        outputs, inputs = 1, 1
        for stored in self.tensors.values():
            if stored.outputs is not None:
                outputs = math.lcm(outputs, stored.outputs.per_entry or 1)
            if stored.inputs is not None and not self.cut_whole(stored):
                inputs = math.lcm(inputs, stored.inputs.per_entry or 1)
        return outputs, inputs

    @property
    def channel_block(self) -> int | None:
        """Number of intermediate channels that stay together, as outputs of one layer and inputs of the next."""
        return math.lcm(*self.head_blocks)

    def cut_whole(self, stored: StoredPart) -> bool:
        """Whether a rank holds the whole tensor along inputs. True for scales and zeros if groups are not runs of
        inputs."""
        return self.reordered and stored.inputs is not None and stored.inputs.per_entry == self.group_size

    def _group_axis(self, dim: int) -> Axis:
        """Returns the axis of scales along inputs."""
        return Axis(dim, self.group_size)
