"""Finds the part of each checkpoint tensor that one rank holds, also of quantized tensors.

A tensor that is not in `baton.models.loading.share_table` is whole on every rank.
"""

import re
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name

from baton.core.errors import ConfigError
from baton.models.checkpoint.names import renamed
from baton.models.checkpoint.share import Share
from baton.models.config.model_config import ModelConfig
from baton.models.config.mtp import LAYER, mtp_form
from baton.models.config.quantization.config import FP8_BLOCK, Fp8Config, Granularity
from baton.models.config.quantization.int8_config import Int8Config
from baton.models.config.quantization.packed_config import PackedConfig, StoredPart
from baton.models.families.table import family_of
from baton.models.layers.parallel import TensorParallel
from baton.models.loading.share_table import experts_by_layer, share_table

_LAYER = re.compile(r"^((model\.layers|transformer\.h)\.\d+|mtp\.layer)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_EXPERT_OF_LAYER = re.compile(r"(?:\.layers\.(\d+)|^mtp\.layer)\.(?:.*\.)?experts\.(\d+)\.")
_SCALE = re.compile(r"\.weight_scale(_inv)?$")


class Shares:
    """The parts of a model's checkpoint that one rank holds.

    Args:
        config: of the whole model, which `local_config` could split.
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        quantization = config.quantization
        self._experts: Sequence[Sequence[int]] | None = None  # of the rank, by layer
        if parallel.whole_experts and config.moe is not None:
            self._experts = experts_by_layer(config.moe, parallel)
        self._packed = quantization if isinstance(quantization, PackedConfig) else None
        self._granularity: Granularity | None = None
        if isinstance(quantization, Fp8Config):
            self._granularity = quantization.weights
        elif isinstance(quantization, Int8Config):
            self._granularity = Granularity.CHANNEL if quantization.by_channel else Granularity.TENSOR
        self._layouts = {} if self._packed is None else {each.suffix: each for each in self._packed.tensors.values()}
        self._table: Mapping[str, Share] = dict(share_table(config, parallel)) if parallel.size > 1 else {}
        prefixes: Mapping[str, str] = resolve_name(family_of(config.architecture).model).checkpoint_prefixes
        # Most tensors of any module are under `model.`, so they keep their names.
        self._prefixes = {theirs: ours for ours, theirs in prefixes.items() if theirs != "model."}
        if config.drafts:
            self._prefixes = {mtp_form(config).prefixes(config.num_layers)[LAYER]: LAYER} | self._prefixes

    def of(self, name: str) -> Share | None:
        """Returns the rank's share of a tensor; None if the rank holds all of it."""
        name = renamed(name, self._prefixes)
        layer, _, suffix = name.rpartition(".")
        if suffix in self._layouts:
            share = self.of(f"{layer}.weight")
            return None if share is None else self._of_packed(share, self._layouts[suffix])
        weight = _SCALE.sub(".weight", name)
        share = self._table.get(weight) or self._table.get(_EXPERT.sub(".experts.*.", _LAYER.sub("", weight)))
        return share if share is None or weight == name else self._of_scale(share, name)

    def elsewhere(self, name: str) -> bool:
        """Whether the tensor belongs to an expert of another rank."""
        match = _EXPERT_OF_LAYER.search(renamed(name, self._prefixes))
        if self._experts is None or match is None:
            return False
        mtp = len(self._experts) - 1
        return int(match[2]) not in self._experts[min(int(match[1] or mtp), mtp)]

    def _of_packed(self, share: Share, layout: StoredPart) -> Share | None:
        """Returns the share of a tensor of packed integers, given the share of the weight."""
        assert self._packed is not None
        axis = layout.outputs if share.dim == 0 else layout.inputs
        if axis is None or axis.per_entry is None or (share.dim == 1 and self._packed.cut_whole(layout)):
            return None
        ranges = []
        for part in share.ranges:
            whole = part.start % axis.per_entry == 0 and (part.stop % axis.per_entry == 0 or part.stop == share.size)
            assert whole, f"{layout.suffix} is cut within an entry, which local_config refuses"
            ranges.append(range(part.start // axis.per_entry, -(-part.stop // axis.per_entry)))
        return Share(axis.dim, -(-share.size // axis.per_entry), tuple(ranges))

    def _of_scale(self, share: Share, name: str) -> Share | None:
        """Returns the share of a weight's scales, given the share of the weight."""
        if self._granularity is Granularity.CHANNEL:
            return share if share.dim == 0 else None
        if self._granularity is Granularity.TENSOR:
            return None
        ranges = []
        for part in share.ranges:
            if part.start % FP8_BLOCK:
                raise ConfigError(
                    f"{name} has blocks of {FP8_BLOCK} rows with parts of two ranks",
                    field="tensor_parallel_size",
                    allowed=("1",),
                    cure="take one rank, or a checkpoint whose parts are multiples of 128 or have their own tensors",
                )
            ranges.append(range(part.start // FP8_BLOCK, -(-part.stop // FP8_BLOCK)))
        return Share(share.dim, -(-share.size // FP8_BLOCK), tuple(ranges))
