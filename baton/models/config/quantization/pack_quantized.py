"""compressed-tensors `pack-quantized`: words along the inputs, signed numbers raised to be unsigned, as zeros are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from baton.models.config.quantization.fields import CURE, SILENT, QuantizationFields
from baton.models.config.quantization.packed_config import Axis, PackedConfig, StoredPart, TensorRole


@dataclass(frozen=True)
class PackQuantizedConfig(PackedConfig):
    """`packing` pack-quantized."""

    @property
    def tensors(self) -> Mapping[TensorRole, StoredPart]:
        words = self.per_word
        tensors = {
            TensorRole.NUMBERS: StoredPart("weight_packed", "I32", Axis(0), Axis(1, words), packed_dim=1),
            TensorRole.SCALES: StoredPart("weight_scale", "", Axis(0), self._group_axis(1)),
            TensorRole.SHAPE: StoredPart("weight_shape", "I64", None, None, optional=True),
        }
        if not self.symmetric:
            zeros = StoredPart("weight_zero_point", "I32", Axis(0, words), self._group_axis(1), packed_dim=0)
            tensors[TensorRole.ZEROS] = zeros
        if self.reordered:
            tensors[TensorRole.GROUPS] = StoredPart("weight_g_idx", "I32", None, Axis(0))
        return tensors


class IntegersFields(QuantizationFields):
    """Weights in words: `num_bits` integers with a scale for a group of inputs or for all."""

    silent: ClassVar[frozenset[str]] = SILENT | {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}

    num_bits: Literal[4, 8]
    type: Literal["int"]
    symmetric: bool = True
    strategy: Literal["group", "channel"]
    dynamic: Literal[False] = False
    group_size: int | None = None
    actorder: Literal["group", "weight", "static"] | bool | None = None
    block_structure: object = None

    def config(self, unquantized: tuple[str, ...]) -> PackQuantizedConfig:
        size = None if self.strategy == "channel" else self.group_size
        if self.strategy == "group" and (size is None or not 1 <= size < 2**31):
            raise self.refuse("group_size", "an integer of at least 1", cure=CURE)
        reordered = self.actorder in ("group", True)
        return PackQuantizedConfig("pack-quantized", self.num_bits, size, self.symmetric, reordered, unquantized)
