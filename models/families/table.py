"""The table of model families: for each architecture, its config reader and its model class."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from models.config.file import ConfigFile
from models.config.model_config import ModelConfig
from models.families.bloom_config import read_bloom
from models.families.deepseek_config import read_deepseek_v2, read_deepseek_v3
from models.families.dense_config import (
    read_ernie4_5,
    read_exaone4,
    read_granite,
    read_hunyuan_dense,
    read_ministral,
    read_ministral3,
    read_mistral3,
    read_olmo2,
    read_olmo3,
    read_seed_oss,
    read_smollm3,
)
from models.families.falcon_config import read_falcon
from models.families.gemma3n_config import read_gemma3n
from models.families.gemma4_config import read_gemma4
from models.families.gemma_config import read_gemma1, read_gemma2, read_gemma3, read_vault_gemma
from models.families.gpt_oss_config import read_gpt_oss
from models.families.llama4_config import read_llama4
from models.families.llama_config import read_llama, read_mistral, read_qwen2, read_qwen3
from models.families.moe_config import (
    read_granite_moe,
    read_hunyuan_moe,
    read_mixtral,
    read_olmoe,
    read_qwen2_moe,
    read_qwen3_moe,
)
from models.families.moe_routers_config import read_ernie_moe, read_glm4_moe, read_minimax_m2, read_phimoe
from models.families.phi3_config import read_phi3
from models.families.phi3_small_config import read_phi3_small
from models.families.stablelm_config import read_stablelm


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        model: "module:class" of its `models.causal_lm.CausalLM`, imported on first use because reading a config must
            not import torch.
        text_config: table of config.json that holds the language model's fields, as in multimodal models.
        or_flat: older files of the architecture have these fields outside of that table.
        overflows_float16: published weights exceed float16's 65504 in the residual stream, so outputs would be NaN.
    """

    read: Callable[[ConfigFile], ModelConfig]
    model: str
    text_config: bool = False
    or_flat: bool = False
    overflows_float16: bool = False


_LLAMA = "models.families.llama:LlamaForCausalLM"
_DEEPSEEK = "models.families.deepseek:DeepseekForCausalLM"
_GEMMA = "models.families.gemma:GemmaForCausalLM"
_GEMMA3N = "models.families.gemma3n:Gemma3nForCausalLM"
_GEMMA4 = "models.families.gemma4:Gemma4ForCausalLM"
_LLAMA4 = "models.families.llama4:Llama4ForCausalLM"

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(read_llama, _LLAMA),
        "MistralForCausalLM": Family(read_mistral, _LLAMA),
        "Qwen2ForCausalLM": Family(read_qwen2, _LLAMA),
        "Qwen3ForCausalLM": Family(read_qwen3, _LLAMA),
        "DeepseekV2ForCausalLM": Family(read_deepseek_v2, _DEEPSEEK),
        "DeepseekV3ForCausalLM": Family(read_deepseek_v3, _DEEPSEEK),
        "Gemma2ForCausalLM": Family(read_gemma2, _GEMMA, overflows_float16=True),
        "Gemma3ForCausalLM": Family(read_gemma3, _GEMMA, overflows_float16=True),
        "Gemma3ForConditionalGeneration": Family(read_gemma3, _GEMMA, text_config=True, overflows_float16=True),
        "Llama4ForCausalLM": Family(read_llama4, _LLAMA4),
        "Llama4ForConditionalGeneration": Family(read_llama4, _LLAMA4, text_config=True),
        "GptOssForCausalLM": Family(read_gpt_oss, "models.families.gpt_oss:GptOssForCausalLM"),
        "FalconForCausalLM": Family(read_falcon, "models.families.falcon:FalconForCausalLM"),
        "BloomForCausalLM": Family(read_bloom, "models.families.bloom:BloomForCausalLM"),
        "Phi3SmallForCausalLM": Family(read_phi3_small, "models.families.phi3_small:Phi3SmallForCausalLM"),
        "Qwen3MoeForCausalLM": Family(read_qwen3_moe, _LLAMA),
        "MixtralForCausalLM": Family(read_mixtral, _LLAMA),
        "Qwen2MoeForCausalLM": Family(read_qwen2_moe, _LLAMA),
        "Glm4MoeForCausalLM": Family(read_glm4_moe, _LLAMA),
        "GraniteMoeForCausalLM": Family(read_granite_moe, _LLAMA),
        "Ernie4_5_MoeForCausalLM": Family(read_ernie_moe, _LLAMA),
        "OlmoeForCausalLM": Family(read_olmoe, _LLAMA),
        "MiniMaxM2ForCausalLM": Family(read_minimax_m2, _LLAMA),
        "HunYuanMoEV1ForCausalLM": Family(read_hunyuan_moe, _LLAMA),
        "PhiMoEForCausalLM": Family(read_phimoe, "models.families.phimoe:PhimoeForCausalLM"),
        "PhimoeForCausalLM": Family(read_phimoe, "models.families.phimoe:PhimoeForCausalLM"),
        # Llama's kin, by models/families/dense_config.py.
        "GraniteForCausalLM": Family(read_granite, _LLAMA),
        "SeedOssForCausalLM": Family(read_seed_oss, _LLAMA),
        "SmolLM3ForCausalLM": Family(read_smollm3, _LLAMA),
        # Part of a head turns, or by several positions.
        "Phi3ForCausalLM": Family(read_phi3, _LLAMA),
        "StableLmForCausalLM": Family(read_stablelm, "models.families.stablelm:StableLMForCausalLM"),
        "Qwen2VLForConditionalGeneration": Family(read_qwen2, _LLAMA, text_config=True, or_flat=True),
        "Qwen2_5_VLForConditionalGeneration": Family(read_qwen2, _LLAMA, text_config=True, or_flat=True),
        "Qwen3VLForConditionalGeneration": Family(read_qwen3, _LLAMA, text_config=True),
        "Olmo2ForCausalLM": Family(read_olmo2, _LLAMA),
        "Olmo3ForCausalLM": Family(read_olmo3, _LLAMA),
        "Exaone4ForCausalLM": Family(read_exaone4, _LLAMA),
        "Ernie4_5ForCausalLM": Family(read_ernie4_5, _LLAMA),
        "HunYuanDenseV1ForCausalLM": Family(read_hunyuan_dense, _LLAMA),
        "MinistralForCausalLM": Family(read_ministral, _LLAMA),
        "Ministral3ForCausalLM": Family(read_ministral3, _LLAMA),
        "Mistral3ForConditionalGeneration": Family(read_mistral3, _LLAMA, text_config=True),
        # Gemma's other kin.
        "GemmaForCausalLM": Family(read_gemma1, _GEMMA),
        "VaultGemmaForCausalLM": Family(read_vault_gemma, _GEMMA),
        "Gemma3nForCausalLM": Family(read_gemma3n, _GEMMA3N, overflows_float16=True),
        "Gemma3nForConditionalGeneration": Family(read_gemma3n, _GEMMA3N, text_config=True, overflows_float16=True),
        "Gemma4ForCausalLM": Family(read_gemma4, _GEMMA4, overflows_float16=True),
        "Gemma4ForConditionalGeneration": Family(read_gemma4, _GEMMA4, text_config=True, overflows_float16=True),
    }
)
