"""A refused architecture names the nearest supported one, and never one that computes something else."""

import re
from functools import cache
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from baton.models.families.features import FEATURES, ModelFeatures
from baton.models.families.nearest import nearest, traits_of
from baton.models.families.table import FAMILIES

NAMES = {
    **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}
# As if only these were supported, so that what is expected below does not change with every new family.
SUPPORTED = {
    name: FEATURES[name]
    for name in (
        *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "DeepseekV2ForCausalLM"),
        *("DeepseekV3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "FalconForCausalLM"),
    )
} | {
    "Qwen3MoeForCausalLM": ModelFeatures(experts=True),
    "HunYuanMoEV1ForCausalLM": ModelFeatures(experts=True),
    "GPTNeoXForCausalLM": ModelFeatures(layer_norm=True),
    "Olmo2ForCausalLM": ModelFeatures(),
}


@cache
def fields_of(model_type: str) -> dict[str, Any]:
    """The defaults of transformers' config class; only the name for one that needs more to be made."""
    try:
        return {**CONFIG_MAPPING[model_type]().to_dict(), "model_type": model_type}
    except (ImportError, OSError, StrictDataclassError, TypeError, ValueError):
        return {"model_type": model_type}


def nearest_of(model_type: str) -> str:
    return nearest(NAMES[model_type], fields_of(model_type), SUPPORTED, SUPPORTED)


def named(sentence: str) -> str:
    found = re.match(r"the nearest supported one is (\w+): ", sentence)
    return found[1] if found else ""


@pytest.mark.parametrize(
    ("model_type", "architecture", "why"),
    [
        ("qwen2_moe", "Qwen3MoeForCausalLM", "the same name"),
        ("qwen3_next", "Qwen3MoeForCausalLM", "recurrent state"),
        ("qwen3_5_text", "Qwen3ForCausalLM", "recurrent state"),
        ("qwen2_5_vl", "Qwen2ForCausalLM", "its language model is qwen2_5_vl_text"),
        ("deepseek_v32", "DeepseekV3ForCausalLM", "select their keys"),
        ("kimi_k25", "DeepseekV3ForCausalLM", "its language model is deepseek_v3"),
        ("gemma", "Gemma2ForCausalLM", "the same name"),
        ("gemma3n_text", "Gemma3ForCausalLM", "the same name"),
        ("vaultgemma", "Gemma2ForCausalLM", "the same name"),
        ("llava", "LlamaForCausalLM", "its language model is llama"),
        ("hunyuan_v1_dense", "HunYuanMoEV1ForCausalLM", "no mixture of experts"),
        ("olmo3", "Olmo2ForCausalLM", "the same name"),
        ("granite", "LlamaForCausalLM", "RMS norms"),
        ("jetmoe", "Qwen3MoeForCausalLM", "a mixture of experts"),
        ("minicpm3", "DeepseekV3ForCausalLM", "latent"),
        ("gpt_neox_japanese", "GPTNeoXForCausalLM", "the same name"),
        ("gptj", "GPTNeoXForCausalLM", "layer norms and a rotary embedding"),
    ],
)
def test_an_architecture_is_near_to_its_kin_or_to_what_its_fields_say(
    model_type: str, architecture: str, why: str
) -> None:
    sentence = nearest_of(model_type)
    assert named(sentence) == architecture
    assert why in sentence


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("mamba", "recurrent state"),
        ("falcon_mamba", "recurrent state"),
        ("falcon_h1", "mamba"),
        ("lfm2", "conv"),
        ("bart", "encoder"),
        ("whisper", "encoder"),
        ("mllama", "cross_attention"),
        ("musicgen", "encoder"),
        ("moshi", "audio"),
        ("deepseek_v4", "attend in a way of their own"),
        *((bert, "") for bert in ("bert", "roberta", "electra", "roformer", "ernie", "modernbert-decoder", "xlnet")),
        *((gpt, "") for gpt in ("gpt2", "gpt_neo", "gpt_bigcode", "openai-gpt", "rwkv", "xglm", "opt", "ctrl")),
        ("diffusion_gemma", ""),
    ],
)
def test_no_architecture_is_near_to_what_is_no_decoder_or_has_other_layers(model_type: str, why: str) -> None:
    sentence = nearest_of(model_type)
    assert not named(sentence)
    assert why in sentence
    assert bool(sentence) == bool(why)


def test_of_all_names_of_transformers_a_near_one_has_the_same_norms_and_cache() -> None:
    types = {NAMES[model_type]: model_type for model_type in sorted(NAMES)}
    count = 0
    for model_type, architecture in NAMES.items():
        best = named(nearest(architecture, fields_of(model_type), FAMILIES, FEATURES))
        if architecture in FAMILIES or best not in types:
            continue
        count += 1
        own, other = traits_of(fields_of(model_type)), traits_of(fields_of(types[best]))
        assert not own.encoder, architecture
        assert own.latent == other.latent, (architecture, best)
        assert own.rms_norm or not other.rms_norm or not own.layer_norm, (architecture, best)
    assert count > 50


def test_fields_of_wrong_types_are_no_error() -> None:
    wrong: tuple[dict[str, object], ...] = (
        {"text_config": 3, "layer_types": 4, "model_type": []},
        {"layer_types": [None, {}]},
    )
    for fields in wrong:
        assert not named(nearest("StrangeForCausalLM", fields, FAMILIES, FEATURES))
