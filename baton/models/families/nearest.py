"""Finds the supported architecture most similar to a refused one, by name and by the fields of its config.json.

Pure functions from names and raw values to a sentence. They know no checkpoint and no other library.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile

from baton.models.families.features import ModelFeatures

# Most typical first.
_DENSE = ("LlamaForCausalLM",)
_EXPERTS = ("Qwen3MoeForCausalLM", "MixtralForCausalLM", "Qwen2MoeForCausalLM")
_LATENT = ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM")
_LAYER_NORMS = ("GPTNeoXForCausalLM",)

_HEAD = re.compile(r"(?:For[A-Z0-9]\w*|LMHeadModel|WithLMHead|Model|Decoder)$")
_ORDINARY_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_RECURRENT = re.compile(r"mamba|ssm|lru_|^linear_(?!bias)|conv|state_size|recurrent|rwkv|xlstm")
_RECURRENT_LAYER = re.compile(r"linear|mamba|conv|recurrent|hybrid|delta")
_ENCODER = re.compile(
    r"^(?:is_encoder_decoder|is_encoder|encoder_layers|cross_\w*|add_cross_attention|(?!audio)\w*encoder_config)$"
)
_AUDIO = re.compile(r"audio|codebook|codec")
_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
# Minimum letters of a name that begins another, of a beginning that two names share, and of a name that ends another.
_BEGINNING_MIN, _SHARED_MIN, _END_MIN = 3, 7, 5


@dataclass(frozen=True)
class Traits:
    """The properties of a model's layers, read from the fields of config.json.

    Attributes:
        encoder: the reason why the model is no text-only decoder.
        unlike: a property of some layers that no supported architecture has.
    """

    experts: bool
    latent: bool
    rms_norm: bool
    layer_norm: bool
    rotary: bool
    attention: bool
    encoder: str
    unlike: str


def nearest(
    architecture: str, fields: Mapping[str, object], supported: Iterable[str], features: Mapping[str, ModelFeatures]
) -> str:
    """Returns one sentence, without a full stop, that names the architecture in `supported` nearest to `architecture`
    and the differences, or says why none is near. Returns "" if the fields do not decide it.

    Args:
        fields: raw fields of the model's config.json; they may have wrong types.
        features: of the supported architectures; one without an entry has `ModelFeatures()`.
    """
    if not architecture.endswith(_CAUSAL):
        return ""
    traits = traits_of(fields)
    if traits.encoder:
        return f"no supported architecture is near: this one has {traits.encoder}"
    known = {name: features.get(name, ModelFeatures()) for name in supported}
    for said, by in _names(architecture, fields):
        relatives = [name for name in known if _akin(_word(said), _word(name)) and _alike(traits, known[name])]
        if relatives:
            best = min(relatives, key=lambda name: _distance(said, traits, name, known[name]))
            return f"the nearest supported one is {best}: {by}{_differences(traits, known[best])}"
    if traits.unlike:
        return f"no supported architecture is near: this one has {traits.unlike}"
    if architecture.endswith("ForConditionalGeneration") and "text_config" not in fields:
        return ""  # the language model's fields are unknown
    candidates, likeness = _typical(traits)
    best = next((name for name in candidates if name in known), "")
    return best and f"the nearest supported one is {best}: as in this config.json, {likeness}"


def traits_of(fields: Mapping[str, object]) -> Traits:
    """Reads the language model's fields, also from their own table."""
    nested = fields.get("text_config")
    values = {**fields, **nested} if isinstance(nested, Mapping) else dict(fields)
    present = {name for name, value in values.items() if isinstance(name, str) and value not in (None, False, 0, "")}
    return Traits(
        experts=any("expert" in name for name in present),
        latent="kv_lora_rank" in present,
        rms_norm=bool(present & {"rms_norm_eps", "rms_norm_epsilon"}),
        layer_norm=bool(present & {"layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layernorm_epsilon"}),
        rotary=any(name.startswith(("rope_", "rotary_")) for name in present),
        attention=any("attention_heads" in name or name in ("n_head", "n_heads", "num_heads") for name in present),
        encoder=_encoder(present),
        unlike=_unlike(values, present),
    )


def _encoder(present: set[str]) -> str:
    named = next((name for name in sorted(present) if _ENCODER.search(name)), "")
    return named and f"an encoder or cross-attention ({named})"


def _unlike(values: Mapping[str, object], present: set[str]) -> str:
    layers = values.get("layer_types")
    kinds = {str(kind) for kind in layers} - _ORDINARY_LAYERS if isinstance(layers, list | tuple) else set()
    recurrent = sorted(name for name in present if _RECURRENT.search(name))
    if recurrent or any(_RECURRENT_LAYER.search(kind) for kind in kinds):
        named = recurrent[0] if recurrent else f"layer_types {', '.join(sorted(kinds)[:3])}"
        return f"layers with a recurrent state or a convolution ({named})"
    if "index_topk" in present or kinds:
        named = ", ".join(sorted(kinds)[:3]) or "index_topk"
        return f"layers that select their keys or attend in a way of their own ({named})"
    named = next((name for name in sorted(present) if _AUDIO.search(name)), "")
    return named and f"audio ({named})"


def _names(architecture: str, fields: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yields the model's names, each with the words for a match by that name."""
    text_config, model_type = fields.get("text_config"), fields.get("model_type")
    nested = text_config.get("model_type") if isinstance(text_config, Mapping) else None
    if isinstance(nested, str):
        yield nested, f"its language model is {nested}"
    yield architecture, "the same name"
    if isinstance(model_type, str):
        yield model_type, f"its model_type is {model_type}"


def _word(name: str) -> str:
    """Returns the letters that a family's members share, such as `qwen` of Qwen3MoeForCausalLM; for GPTs, which share
    only these three letters, the whole name."""
    letters = re.sub(r"[^a-z0-9]", "", _HEAD.sub("", name).lower())
    return letters if letters.startswith("gpt") else re.split(r"\d", letters, maxsplit=1)[0]


def _akin(one: str, other: str) -> bool:
    """Whether two names are related, such as Phimoe and Phi, HunYuanDense and HunYuanMoE, or VaultGemma and Gemma.
    GPT-Neo and GPT-NeoX are not."""
    common, shorter = _common(one, other), min(len(one), len(other))
    ends = shorter >= _END_MIN and (one.endswith(other) or other.endswith(one))
    begins = shorter >= (_SHARED_MIN if one.startswith("gpt") else _BEGINNING_MIN) and common == shorter
    return common >= _SHARED_MIN or begins or ends


def _common(one: str, other: str) -> int:
    """Returns the length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _alike(traits: Traits, features: ModelFeatures) -> bool:
    """Whether the traits fit the features, so that equal names mean equal kinds of layers."""
    norms_differ = traits.rms_norm if features.layer_norm else traits.layer_norm and not traits.rms_norm
    return traits.attention and not norms_differ and traits.latent == features.latent


def _distance(said: str, traits: Traits, name: str, features: ModelFeatures) -> tuple[bool, bool, float, int]:
    wrapper = name.endswith("ForConditionalGeneration") != said.endswith("ForConditionalGeneration")
    versions = abs(_version(said) - _version(name))
    return traits.experts != features.experts, wrapper, versions, -_common(said.lower(), name.lower())


def _version(said: str) -> float:
    """Returns the version in a name, such as 3.5 of Qwen3_5ForCausalLM; 1 without a number."""
    found = re.search(r"(\d)(?:_(\d))?", _HEAD.sub("", said))
    return float(f"{found[1]}.{found[2] or 0}") if found else 1.0


def _differences(traits: Traits, features: ModelFeatures) -> str:
    parts = [traits.unlike] if traits.unlike else []
    if traits.experts != features.experts:
        parts.append(f"{'a' if traits.experts else 'no'} mixture of experts")
    return f", but this one has {' and '.join(parts)}" if parts else ""


def _typical(traits: Traits) -> tuple[tuple[str, ...], str]:
    """Returns the typical architectures of a kind, and the properties that define it."""
    if not (traits.attention and traits.rotary):
        return (), ""
    if traits.latent:
        return _LATENT, "a latent KV cache (MLA)"
    if traits.rms_norm and traits.experts:
        return _EXPERTS, "RMS norms, a rotary embedding and a mixture of experts"
    if traits.rms_norm:
        return _DENSE, "RMS norms, a rotary embedding and no mixture of experts"
    if traits.layer_norm and not traits.experts:
        return _LAYER_NORMS, "layer norms and a rotary embedding"
    return (), ""
