"""Reads the adapter_config.json that PEFT writes, which sets the scale of each layer's product. It imports no torch.

Every field that changes the computation is read or refused by name. An unknown field is refused unless it is null,
false or empty. PEFT finds the alpha of a layer by the first key of `alpha_pattern` that is the layer's name or its end;
a key may be a regular expression.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import ConfigError
from baton.models.config.file import ConfigFile, shown
from baton.models.config.patterns import may_hang

CONFIG_FILE = "adapter_config.json"
# These fields name the base, describe how training began, or list the trained layers, which the tensors show too.
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "base_model_class", "corda_config", "eva_config", "exclude_modules",
        "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "parent_library",
        "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "target_parameters",
        "task_type",
        "ensure_weight_tying", "loftq_config", "megatron_core", "lora_ga_config",
    }
)  # fmt: skip
_READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"})
# Initializations that change the base's weights. PEFT can convert such adapters, and then writes `true` into the
# config.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_DAMAGED = "save the adapter again with PEFT"
_NUMBER_MAX = 3e38  # scales are float32
_FORKS_MAX = 3  # per key; matching a layer then takes milliseconds
_CURES = {
    "use_dora": "train without DoRA, or merge it into the base",
    "modules_to_save": "train linear layers only, or merge the adapter into the base",
}


@dataclass(frozen=True)
class AdapterConfig:
    """The content of `adapter_config.json` that affects results.

    Args:
        rank, alpha: for layers that no pattern names.
        rslora: the scale is alpha / sqrt(rank), else alpha / rank.
    """

    where: str
    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[re.Pattern[str], int]
    alphas: Mapping[re.Pattern[str], float]

    def rank_of(self, layer: str) -> int:
        """The adapter's rank in a layer.

        Args:
            layer: its name in the base's checkpoint, without `.weight`; for a tensor of all experts, the tensor's name.
        """
        return next((rank for key, rank in self.ranks.items() if key.match(layer)), self.rank)

    def scale_of(self, layer: str) -> float:
        """The factor of the layer's product."""
        alpha = next((alpha for key, alpha in self.alphas.items() if key.match(layer)), self.alpha)
        rank = self.rank_of(layer)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Reads a directory's `adapter_config.json`.

    Raises:
        ConfigError: the file is missing or damaged, or needs an unsupported feature.
    """
    if not (directory / CONFIG_FILE).exists():
        cure = "give the directory of an adapter as PEFT saves it"
        raise ConfigError(f"{directory} has no {CONFIG_FILE}", field="adapter", value=str(directory), cure=cure)
    file = ConfigFile.read(directory / CONFIG_FILE)
    if file.raw("peft_type") != "LORA":
        raise file.refuse("peft_type", "LORA", cure="other methods than LoRA are not supported")
    if file.raw("bias") not in (None, "none"):
        raise file.refuse("bias", "none", cure="train the adapter without biases")
    begun = file.raw("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        cure = "save it with path_initial_model_for_weight_conversion: it belongs to a base with changed weights"
        raise file.refuse("init_lora_weights", "true", "gaussian", "eva", cure=cure)
    for name, value in file.values.items():
        if value and name not in _READ and name not in _WITHOUT_EFFECT and name != "init_lora_weights":
            raise file.refuse(name, "null", "false", cure=_CURES.get(name, "this feature of PEFT is not supported"))
    rslora = file.raw("use_rslora") or False
    if not isinstance(rslora, bool):
        raise file.refuse("use_rslora", "true", "false")
    return AdapterConfig(
        where=file.where,
        rank=_count(file, "r"),
        alpha=_number(file, "lora_alpha"),
        rslora=rslora,
        ranks={key: _count(file.table("rank_pattern"), name) for name, key in _patterns(file, "rank_pattern")},
        alphas={key: _number(file.table("alpha_pattern"), name) for name, key in _patterns(file, "alpha_pattern")},
    )


def _patterns(file: ConfigFile, name: str) -> list[tuple[str, re.Pattern[str]]]:
    """Returns the keys of a table, each with a pattern that matches the layers it names."""
    return [(key, _pattern(file, name, key)) for key in file.table(name).values]


def _pattern(file: ConfigFile, name: str, key: str) -> re.Pattern[str]:
    if may_hang(key, forks_max=_FORKS_MAX):
        allowed = f"regular expressions with up to {_FORKS_MAX} groups and repeats, no repeated group"
        cure = f"{shown(key)} could take too long to match; list the layers by name"
        raise file.refuse(name, "names of layers", allowed, cure=cure)
    try:
        return re.compile(rf"(.*\.)?({key})$")
    except (re.error, OverflowError) as error:
        cure = f"{shown(key)} is none: {error}"
        raise file.refuse(name, "names of layers", "regular expressions", cure=cure) from None


def _count(file: ConfigFile, name: str) -> int:
    value = file.raw(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 16:
        raise file.refuse(name, "an integer of at least 1", cure=_DAMAGED)
    return value


def _number(file: ConfigFile, name: str) -> float:
    value = file.raw(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _NUMBER_MAX:
        raise file.refuse(name, f"a number of at most {_NUMBER_MAX:g}", cure=_DAMAGED)
    return float(value)
