"""`read_config` reads a checkpoint's config.json of any supported family.

The readers of the families own every difference between field names and defaults of families and of transformers'
versions. A feature that is switched on and that we do not compute is an error here. No torch.
"""

from pathlib import Path

from models.config.file import ConfigFile
from models.config.model_config import ModelConfig
from models.families.table import FAMILIES
from models.weights.checkpoint import stored_dtype

_UNSUPPORTED = (
    "quantization_config",
    "compression_config",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention_chunk_size",
    "clip_qkv",
    "index_topk",
    "no_rope_layers",
    "use_mrope",
    "alibi",
)


def read_config(directory: Path) -> ModelConfig:
    """The configuration of the checkpoint in `directory`.

    Raises:
        ConfigError: a file cannot be read, a field is missing or wrong, or the model needs what we do not compute.
    """
    file = ConfigFile.read(directory / "config.json")
    architecture = _architecture(file)
    family = FAMILIES[architecture]
    if family.text_config:
        file = _text_config(file)
    _refuse_unsupported(file, family.computes)
    if "dtype" not in file and "torch_dtype" not in file:  # as BLOOM was published, in float16
        file = file.with_values({"dtype": stored_dtype(directory)})
    return family.read(file, architecture, _eos_token_ids(directory, file))


def _architecture(file: ConfigFile) -> str:
    names = file.texts("architectures")
    if len(names) != 1 or names[0] not in FAMILIES:
        raise file.refuse("architectures", *FAMILIES)
    return names[0]


def _text_config(file: ConfigFile) -> ConfigFile:
    """The table, with what publishers leave outside of it."""
    if "text_config" not in file:
        raise file.refuse("text_config", "an object")
    outside = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings", "quantization_config")
    return file.table("text_config").with_defaults({name: file.raw(name) for name in outside if name in file})


def _refuse_unsupported(file: ConfigFile, computed: frozenset[str]) -> None:
    """Refuses fields that change what a model computes and that its reader does not look at, unless they are off."""
    for name in _UNSUPPORTED:
        if name not in computed and file.raw(name):
            raise file.refuse(name, "null", cure="this feature is not supported; choose another checkpoint")
    if file.number("partial_rotary_factor", 1.0) != 1.0:
        raise file.refuse("partial_rotary_factor", "1.0")
    if "hidden_act" not in computed and file.raw("hidden_act") not in (None, "silu", "swish"):
        raise file.refuse("hidden_act", "silu")


def _eos_token_ids(directory: Path, file: ConfigFile) -> tuple[int, ...]:
    """From generation_config.json, which publishers keep current, else from config.json; none if neither names any."""
    path = directory / "generation_config.json"
    if path.exists() and (ids := ConfigFile.read(path).integers("eos_token_id")):
        return ids
    return file.integers("eos_token_id")
