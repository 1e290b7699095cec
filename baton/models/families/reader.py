"""`read_config` reads a checkpoint's config.json of any supported family.

The families' readers handle all differences in field names and defaults, between families and between versions of
transformers. An enabled feature that is not supported is an error.
"""

from dataclasses import replace
from pathlib import Path

from baton.kvcache.spec import DTYPE_BYTES
from baton.models.checkpoint.checkpoint import stored_dtype
from baton.models.config.fields import Fields, Integers, Texts
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import ModelConfig
from baton.models.config.pooling import has_head, num_labels
from baton.models.families.features import FEATURES
from baton.models.families.nearest import nearest
from baton.models.families.table import FAMILIES, Family, find_family

# Fields that publishers keep outside the language model's table.
_OUTSIDE = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", "quantization_config")

# transformers ties the whole model by this field and ignores the language model's table.
_OF_THE_WHOLE = "tie_word_embeddings"


class _Architectures(Fields):
    architectures: Texts = ()


class _EndOfText(Fields):
    eos_token_id: Integers = ()


def read_config(directory: Path) -> ModelConfig:
    """Reads the configuration of the checkpoint in `directory`.

    Raises:
        ConfigError: a file cannot be read, a field is missing or wrong, or the model needs an unsupported feature.
    """
    whole = file = ConfigFile.read(directory / "config.json")
    architecture, family = _family(file)
    if family.text_config and not (family.or_flat and file.raw("text_config") is None):
        file = _text_config(file)
    config = family.read(
        file.with_values(
            {
                "architectures": [architecture],
                "dtype": _dtype(directory, file),
                "eos_token_id": list(_eos_token_ids(directory, file)),
            }
        )
    )
    return _with_its_head(config, directory, whole)


def _with_its_head(config: ModelConfig, directory: Path, file: ConfigFile) -> ModelConfig:
    """Returns the config without a language model head, if the checkpoint has none or pools hidden states instead."""
    if file.raw("is_causal") is False:
        raise file.refuse("is_causal", "true", cure="bidirectional attention is not supported")
    labels = num_labels(file)
    if has_head(directory) and _Architectures.read(file).architectures[0] == config.architecture:
        return config
    # Without a head of its own, the embedding takes its place, so that warm-up steps can sample.
    return replace(config, headless=True, num_labels=labels, tie_word_embeddings=True)


def _family(file: ConfigFile) -> tuple[str, Family]:
    names = _Architectures.read(file).architectures
    for name in (names[0], generative_name(names[0])) if len(names) == 1 else ():
        if (family := find_family(name)) is not None:
            return name, family
    raise file.refuse("architectures", *FAMILIES, cure=_nearest(names, file))


def generative_name(architecture: str) -> str:
    """Returns the name of the architecture with a language model head, for one without a head or with that of a
    classifier."""
    for ending in ("ForSequenceClassification", "TextModel", "Model"):
        if architecture.endswith(ending):
            return architecture.removesuffix(ending) + "ForCausalLM"
    return architecture


def _nearest(names: tuple[str, ...], file: ConfigFile) -> str:
    return nearest(names[0], file.values, FAMILIES, FEATURES) if len(names) == 1 else ""


def _text_config(file: ConfigFile) -> ConfigFile:
    if file.raw("text_config") is None:
        raise file.refuse("text_config", "an object")
    table = file.table("text_config")
    outside = {name: file.raw(name) for name in _OUTSIDE if file.raw(name) is not None}
    ties = {name: value for name, value in outside.items() if name == _OF_THE_WHOLE}
    return ConfigFile(table.where, {**outside, **table.values, **ties})


def _dtype(directory: Path, file: ConfigFile) -> str:
    """Returns the file's dtype, or the weights' dtype if it names none, as in BLOOM's published files. Models run in
    float32 at most, so float64 becomes float32."""
    name = "torch_dtype" if file.raw("dtype") is None else "dtype"
    if file.raw(name) is None:
        file = file.with_values({name: stored_dtype(directory) or "float32"})
    dtype = file.raw(name)
    if dtype == "float64":
        return "float32"
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise file.refuse(name, *DTYPE_BYTES, "float64")
    return dtype


def _eos_token_ids(directory: Path, file: ConfigFile) -> tuple[int, ...]:
    """Returns the ids in generation_config.json, which publishers keep current; else the ids in config.json; else
    ()."""
    of_config = _EndOfText.read(file).eos_token_id  # a wrong value is an error even if unused
    path = directory / "generation_config.json"
    of_generation = _EndOfText.read(ConfigFile.read(path)).eos_token_id if path.exists() else ()
    return of_generation or of_config
