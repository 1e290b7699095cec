"""compressed-tensors `int-quantized`: symmetric 8-bit weights and inputs. It imports no torch."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from baton.models.config.quantization.fields import SILENT, QuantizationFields, leaves_out


@dataclass(frozen=True)
class Int8Config:
    """A checkpoint with linear layers in int8, with one scale per output or per tensor.

    Attributes:
        number: the scheme's name, so that the digest of a model differs from that of every other scheme.
        by_channel: weights have one scale per output; otherwise one per tensor.
        static_inputs: the checkpoint has one scale for each layer's inputs. Otherwise each token gets its own.
        unquantized: as in `Fp8Config`.
    """

    number: Literal["int8"]
    by_channel: bool
    static_inputs: bool
    unquantized: tuple[str, ...] = ()

    def covers(self, name: str) -> bool:
        """Whether the linear layer that checkpoints call `name` is in int8."""
        return name != "lm_head" and not leaves_out(self.unquantized, name)

    @property
    def weight_bytes(self) -> float:
        return 1

    @property
    def channel_block(self) -> int | None:
        return None

    @property
    def head_blocks(self) -> tuple[int, int] | None:
        return None


class Int8Fields(QuantizationFields):
    """The fields of symmetric 8-bit integers, for weights or for layers' inputs."""

    silent: ClassVar[frozenset[str]] = SILENT | {"observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype"}

    num_bits: Literal[8]
    type: Literal["int"]
    symmetric: Literal[True] = True
    strategy: Literal["tensor", "channel", "token"]
    dynamic: bool = False
    group_size: None = None
    block_structure: None = None


def int8_config(weights: Int8Fields, inputs: Int8Fields, unquantized: tuple[str, ...]) -> Int8Config:
    if weights.dynamic:
        raise weights.refuse("dynamic", "false")
    if weights.strategy == "token":
        raise weights.refuse("strategy", "tensor", "channel")
    if (inputs.strategy, inputs.dynamic) not in (("token", True), ("tensor", False)):
        raise inputs.refuse("strategy", "token, dynamic", "tensor, static")
    return Int8Config("int8", weights.strategy == "channel", not inputs.dynamic, unquantized)
