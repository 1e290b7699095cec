"""`read_config` reads a checkpoint's config.json of any supported family.

The readers of the families own every difference between field names and defaults of families and of transformers'
versions. A feature that is switched on and that we do not compute is an error here. No torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from models.config.bloom import read_bloom
from models.config.deepseek import read_deepseek_v2, read_deepseek_v3
from models.config.falcon import read_falcon
from models.config.file import ConfigFile
from models.config.gemma import read_gemma2, read_gemma3
from models.config.gpt_oss import read_gpt_oss
from models.config.llama import read_llama, read_mistral, read_qwen2, read_qwen3
from models.config.llama4 import read_llama4
from models.config.model_config import ModelConfig
from models.config.phi3_small import read_phi3_small
from models.weights.checkpoint import stored_dtype


@dataclass(frozen=True)
class _Family:
    """Attributes:
    computes: the fields of `_UNSUPPORTED`, and `hidden_act`, where this family's reader takes care of them.
    text_config: of a model that also sees: the language model's fields are in this table.
    """

    read: Callable[[ConfigFile, str, tuple[int, ...]], ModelConfig]
    computes: frozenset[str] = frozenset()
    text_config: bool = False


_QUANTIZED = frozenset(
    {"quantization_config"}
)  # families of plain linear layers, which `models.quantization.apply` knows
_GEMMA3_FIELDS = _QUANTIZED | {"hidden_act", "final_logit_softcapping"}
_GEMMA2_FIELDS = _GEMMA3_FIELDS | {"attn_logit_softcapping"}
_LLAMA4_FIELDS = frozenset({"attention_chunk_size", "no_rope_layers"})

_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "LlamaForCausalLM": _Family(read_llama, _QUANTIZED),
        "MistralForCausalLM": _Family(read_mistral, _QUANTIZED),
        "Qwen2ForCausalLM": _Family(read_qwen2, _QUANTIZED),
        "Qwen3ForCausalLM": _Family(read_qwen3, _QUANTIZED),
        "DeepseekV2ForCausalLM": _Family(read_deepseek_v2, _QUANTIZED),
        "DeepseekV3ForCausalLM": _Family(read_deepseek_v3, _QUANTIZED),
        "Gemma2ForCausalLM": _Family(read_gemma2, _GEMMA2_FIELDS),
        "Gemma3ForCausalLM": _Family(read_gemma3, _GEMMA3_FIELDS),
        "Gemma3ForConditionalGeneration": _Family(read_gemma3, _GEMMA3_FIELDS, text_config=True),
        "Llama4ForCausalLM": _Family(read_llama4, _LLAMA4_FIELDS),
        "Llama4ForConditionalGeneration": _Family(read_llama4, _LLAMA4_FIELDS, text_config=True),
        "GptOssForCausalLM": _Family(read_gpt_oss, _QUANTIZED),
        "FalconForCausalLM": _Family(read_falcon, frozenset({"alibi"})),
        "BloomForCausalLM": _Family(read_bloom),
        "Phi3SmallForCausalLM": _Family(read_phi3_small, frozenset({"hidden_act"})),
    }
)
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
    family = _FAMILIES[architecture]
    if family.text_config:
        file = _text_config(file)
    _refuse_unsupported(file, family.computes)
    if "dtype" not in file and "torch_dtype" not in file:  # as BLOOM was published, in float16
        file = file.with_values({"dtype": stored_dtype(directory)})
    return family.read(file, architecture, _eos_token_ids(directory, file))


def _architecture(file: ConfigFile) -> str:
    names = file.texts("architectures")
    if len(names) != 1 or names[0] not in _FAMILIES:
        raise file.refuse("architectures", *_FAMILIES)
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
