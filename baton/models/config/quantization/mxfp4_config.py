"""The published form of gpt-oss: experts' weights in 4-bit floats, with a power of two for every 32. It imports no
torch."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from baton.models.config.fields import Texts
from baton.models.config.quantization.fields import SILENT, QuantizationFields, leaves_out

MXFP4_BLOCK = 32  # inputs that share a scale


@dataclass(frozen=True)
class Mxfp4Config:
    """A checkpoint with experts in mxfp4.

    Attributes:
        number: the scheme's name, so that the digest of a model differs from that of every other scheme.
        unquantized: as in `Fp8Config`.
    """

    number: Literal["mxfp4"]
    unquantized: tuple[str, ...] = ()

    def covers(self, name: str) -> bool:
        """Whether the experts that checkpoints call `name` are in mxfp4. False for linear layers."""
        return name.endswith("mlp.experts") and not leaves_out(self.unquantized, name)

    @property
    def weight_bytes(self) -> float:
        return 0.5

    @property
    def channel_block(self) -> int | None:
        return MXFP4_BLOCK

    @property
    def head_blocks(self) -> tuple[int, int] | None:
        return None


class Mxfp4Fields(QuantizationFields):
    silent: ClassVar[frozenset[str]] = SILENT

    modules_to_not_convert: Texts = ()

    def config(self) -> Mxfp4Config:
        return Mxfp4Config("mxfp4", self.names("modules_to_not_convert", self.modules_to_not_convert))
