"""AWQ as AutoAWQ writes it for its gemm kernel: words along the outputs, even outputs before odd ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from baton.models.config.fields import Count, Texts
from baton.models.config.quantization.fields import SILENT, QuantizationFields
from baton.models.config.quantization.packed_config import Axis, PackedConfig, StoredPart, TensorRole

# The output that each place of a word holds, from the lowest bits on.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class AwqConfig(PackedConfig):
    """`packing` awq."""

    @property
    def tensors(self) -> Mapping[TensorRole, StoredPart]:
        words = self.per_word
        return {
            TensorRole.NUMBERS: StoredPart("qweight", "I32", Axis(1, words), Axis(0), packed_dim=1, order=_ORDER),
            TensorRole.ZEROS: StoredPart(
                "qzeros", "I32", Axis(1, words), self._group_axis(0), packed_dim=1, order=_ORDER
            ),
            TensorRole.SCALES: StoredPart("scales", "", Axis(1), self._group_axis(0)),
        }


class AwqFields(QuantizationFields):
    silent: ClassVar[frozenset[str]] = SILENT | {
        "backend",
        "do_fuse",
        "exllama_config",
        "fuse_max_seq_len",
        "modules_to_fuse",
    }

    bits: Literal[4]
    group_size: Count
    zero_point: Literal[True]
    version: Literal["gemm", "GEMM"] = "gemm"
    modules_to_not_convert: Texts = ()

    def config(self) -> AwqConfig:
        names = self.names("modules_to_not_convert", self.modules_to_not_convert)
        return AwqConfig("awq", self.bits, self.group_size, symmetric=False, unquantized=names)
