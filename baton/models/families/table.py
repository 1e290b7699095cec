"""The table of model families: for each architecture, its config reader and its model class.

Other distributions register a `Family` by an entry point of the group `baton.model_families`, named after the
architecture.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from baton.core import plugins
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import ModelConfig
from baton.models.families.dense.bloom_config import read_bloom
from baton.models.families.dense.dense_config import (
    read_apertus,
    read_arcee,
    read_cohere,
    read_cohere2,
    read_ernie4_5,
    read_exaone4,
    read_glm,
    read_glm4,
    read_granite,
    read_hunyuan_dense,
    read_olmo2,
    read_olmo3,
    read_seed_oss,
    read_smollm3,
)
from baton.models.families.dense.falcon_config import read_falcon
from baton.models.families.dense.gemma3n_config import read_gemma3n
from baton.models.families.dense.gemma4_config import read_gemma4
from baton.models.families.dense.gemma_config import read_gemma1, read_gemma2, read_gemma3, read_vault_gemma
from baton.models.families.dense.layer_norm_config import (
    read_gpt2,
    read_gpt_neox,
    read_mpt,
    read_nemotron,
    read_opt,
    read_starcoder2,
)
from baton.models.families.dense.llama_config import (
    read_llama,
    read_mimo_dense,
    read_qwen2,
    read_qwen3,
)
from baton.models.families.dense.mistral_config import (
    read_ministral,
    read_ministral3,
    read_mistral,
    read_mistral3,
)
from baton.models.families.dense.phi3_config import read_phi3
from baton.models.families.dense.phi3_small_config import read_phi3_small
from baton.models.families.dense.stablelm_config import read_stablelm
from baton.models.families.hybrid.delta_config import read_qwen3_5, read_qwen3_5_moe, read_qwen3_next
from baton.models.families.hybrid.falcon_h1_config import read_falcon_h1
from baton.models.families.hybrid.kimi_linear_config import read_kimi_linear
from baton.models.families.hybrid.lfm2_config import read_lfm2, read_lfm2_moe
from baton.models.families.hybrid.mamba_config import read_bamba, read_granite_hybrid, read_nemotron_h
from baton.models.families.latent.deepseek_config import read_deepseek_v2, read_deepseek_v3, read_glm4_moe_lite
from baton.models.families.latent.deepseek_sparse_config import read_deepseek_v32, read_glm_moe_dsa
from baton.models.families.latent.longcat_config import read_longcat
from baton.models.families.moe.gpt_oss_config import read_gpt_oss
from baton.models.families.moe.grouped_moe_config import read_dots1, read_exaone_moe, read_solar_open
from baton.models.families.moe.llama4_config import read_llama4
from baton.models.families.moe.mimo_config import read_mimo
from baton.models.families.moe.moe_config import (
    read_granite_moe,
    read_hunyuan_moe,
    read_mixtral,
    read_olmoe,
    read_qwen2_moe,
    read_qwen3_moe,
    read_qwen3_vl_moe,
)
from baton.models.families.moe.moe_routers_config import read_ernie_moe, read_glm4_moe, read_minimax_m2, read_phimoe


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        model: "module:class" of its `baton.models.layers.causal_lm.CausalLM`. It is imported on first use, because
            reading a config must not import torch.
        text_config: table of config.json with the language model's fields, as in multimodal models.
        or_flat: the architecture's older files have these fields outside that table.
        overflows_float16: published weights exceed float16's 65504 in the residual stream, so outputs would be NaN.
    """

    read: Callable[[ConfigFile], ModelConfig]
    model: str
    text_config: bool = False
    or_flat: bool = False
    overflows_float16: bool = False


_LLAMA = "baton.models.families.dense.llama:LlamaForCausalLM"
_DEEPSEEK = "baton.models.families.latent.deepseek:DeepseekForCausalLM"
_GEMMA = "baton.models.families.dense.gemma:GemmaForCausalLM"
_GEMMA3N = "baton.models.families.dense.gemma3n:Gemma3nForCausalLM"
_GEMMA4 = "baton.models.families.dense.gemma4:Gemma4ForCausalLM"
_LLAMA4 = "baton.models.families.moe.llama4:Llama4ForCausalLM"
_QWEN3_NEXT = "baton.models.families.hybrid.qwen3_next:Qwen3NextForCausalLM"
_GRANITE_HYBRID = "baton.models.families.hybrid.granite_hybrid"
_LFM2 = "baton.models.families.hybrid.lfm2:Lfm2ForCausalLM"
_LAYER_NORM = "baton.models.families.dense.layer_norm_decoder"

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        # Llama's file, dense.
        "LlamaForCausalLM": Family(read_llama, _LLAMA),
        "MistralForCausalLM": Family(read_mistral, _LLAMA),
        "MinistralForCausalLM": Family(read_ministral, _LLAMA),
        "Ministral3ForCausalLM": Family(read_ministral3, _LLAMA),
        "Mistral3ForConditionalGeneration": Family(read_mistral3, _LLAMA, text_config=True),
        "Qwen2ForCausalLM": Family(read_qwen2, _LLAMA),
        "MiMoForCausalLM": Family(read_mimo_dense, _LLAMA),
        "Qwen3ForCausalLM": Family(read_qwen3, _LLAMA),
        "Qwen2VLForConditionalGeneration": Family(read_qwen2, _LLAMA, text_config=True, or_flat=True),
        "Qwen2_5_VLForConditionalGeneration": Family(read_qwen2, _LLAMA, text_config=True, or_flat=True),
        "Qwen3VLForConditionalGeneration": Family(read_qwen3, _LLAMA, text_config=True),
        "Phi3ForCausalLM": Family(read_phi3, _LLAMA),
        "SmolLM3ForCausalLM": Family(read_smollm3, _LLAMA),
        "SeedOssForCausalLM": Family(read_seed_oss, _LLAMA),
        "GraniteForCausalLM": Family(read_granite, _LLAMA),
        "Olmo2ForCausalLM": Family(read_olmo2, _LLAMA),
        "Olmo3ForCausalLM": Family(read_olmo3, _LLAMA),
        "Exaone4ForCausalLM": Family(read_exaone4, _LLAMA),
        "Ernie4_5ForCausalLM": Family(read_ernie4_5, _LLAMA),
        "HunYuanDenseV1ForCausalLM": Family(read_hunyuan_dense, _LLAMA),
        "CohereForCausalLM": Family(read_cohere, _LLAMA),
        "Cohere2ForCausalLM": Family(read_cohere2, _LLAMA),
        "GlmForCausalLM": Family(read_glm, _LLAMA),
        "Glm4ForCausalLM": Family(read_glm4, _LLAMA),
        "ArceeForCausalLM": Family(read_arcee, _LLAMA),
        "ApertusForCausalLM": Family(read_apertus, "baton.models.families.dense.llama:ApertusForCausalLM"),
        # Llama's file, with a mixture of experts.
        "MixtralForCausalLM": Family(read_mixtral, _LLAMA),
        "Qwen2MoeForCausalLM": Family(read_qwen2_moe, _LLAMA),
        "Qwen3MoeForCausalLM": Family(read_qwen3_moe, _LLAMA),
        "OlmoeForCausalLM": Family(read_olmoe, _LLAMA),
        "GraniteMoeForCausalLM": Family(read_granite_moe, _LLAMA),
        "Glm4MoeForCausalLM": Family(read_glm4_moe, _LLAMA),
        "Dots1ForCausalLM": Family(read_dots1, _LLAMA),
        "SolarOpenForCausalLM": Family(read_solar_open, _LLAMA),
        "ExaoneMoeForCausalLM": Family(read_exaone_moe, _LLAMA),
        "ExaoneMoEForCausalLM": Family(read_exaone_moe, _LLAMA),
        "MiniMaxM2ForCausalLM": Family(read_minimax_m2, _LLAMA),
        "Ernie4_5_MoeForCausalLM": Family(read_ernie_moe, _LLAMA),
        "HunYuanMoEV1ForCausalLM": Family(read_hunyuan_moe, _LLAMA),
        "Qwen3VLMoeForConditionalGeneration": Family(read_qwen3_vl_moe, _LLAMA, text_config=True),
        # Experts in files of their own.
        "DeepseekV2ForCausalLM": Family(read_deepseek_v2, _DEEPSEEK),
        "DeepseekV3ForCausalLM": Family(read_deepseek_v3, _DEEPSEEK),
        "Glm4MoeLiteForCausalLM": Family(read_glm4_moe_lite, _DEEPSEEK),
        "KimiK25ForConditionalGeneration": Family(read_deepseek_v3, _DEEPSEEK, text_config=True),
        "LongcatFlashForCausalLM": Family(read_longcat, "baton.models.families.latent.longcat:LongcatFlashForCausalLM"),
        # Sparse attention.
        "DeepseekV32ForCausalLM": Family(read_deepseek_v32, _DEEPSEEK),
        "GlmMoeDsaForCausalLM": Family(read_glm_moe_dsa, _DEEPSEEK),
        "Llama4ForCausalLM": Family(read_llama4, _LLAMA4),
        "Llama4ForConditionalGeneration": Family(read_llama4, _LLAMA4, text_config=True),
        "MiMoV2FlashForCausalLM": Family(read_mimo, "baton.models.families.moe.mimo:MiMoV2FlashForCausalLM"),
        "GptOssForCausalLM": Family(read_gpt_oss, "baton.models.families.moe.gpt_oss:GptOssForCausalLM"),
        "PhimoeForCausalLM": Family(read_phimoe, "baton.models.families.moe.phimoe:PhimoeForCausalLM"),
        "PhiMoEForCausalLM": Family(read_phimoe, "baton.models.families.moe.phimoe:PhimoeForCausalLM"),
        # Short convolutions.
        "Lfm2ForCausalLM": Family(read_lfm2, _LFM2),
        "Lfm2MoeForCausalLM": Family(read_lfm2_moe, _LFM2),
        # Gemma's kin.
        "GemmaForCausalLM": Family(read_gemma1, _GEMMA),
        "VaultGemmaForCausalLM": Family(read_vault_gemma, _GEMMA),
        "Gemma2ForCausalLM": Family(read_gemma2, _GEMMA, overflows_float16=True),
        "Gemma3ForCausalLM": Family(read_gemma3, _GEMMA, overflows_float16=True),
        "Gemma3ForConditionalGeneration": Family(read_gemma3, _GEMMA, text_config=True, overflows_float16=True),
        "Gemma3nForCausalLM": Family(read_gemma3n, _GEMMA3N, overflows_float16=True),
        "Gemma3nForConditionalGeneration": Family(read_gemma3n, _GEMMA3N, text_config=True, overflows_float16=True),
        "Gemma4ForCausalLM": Family(read_gemma4, _GEMMA4, overflows_float16=True),
        "Gemma4ForConditionalGeneration": Family(read_gemma4, _GEMMA4, text_config=True, overflows_float16=True),
        # A delta rule in most layers.
        "Qwen3NextForCausalLM": Family(read_qwen3_next, _QWEN3_NEXT),
        "Qwen3_5ForCausalLM": Family(read_qwen3_5, _QWEN3_NEXT),
        "Qwen3_5ForConditionalGeneration": Family(read_qwen3_5, _QWEN3_NEXT, text_config=True),
        "Qwen3_5MoeForCausalLM": Family(read_qwen3_5_moe, _QWEN3_NEXT),
        "Qwen3_5MoeForConditionalGeneration": Family(read_qwen3_5_moe, _QWEN3_NEXT, text_config=True),
        "KimiLinearForCausalLM": Family(
            read_kimi_linear, "baton.models.families.hybrid.kimi_linear:KimiLinearForCausalLM"
        ),
        # Mamba-2 in most layers, or in all next to attention.
        "GraniteMoeHybridForCausalLM": Family(read_granite_hybrid, f"{_GRANITE_HYBRID}:GraniteHybridForCausalLM"),
        "BambaForCausalLM": Family(read_bamba, f"{_GRANITE_HYBRID}:BambaForCausalLM"),
        "FalconH1ForCausalLM": Family(read_falcon_h1, "baton.models.families.hybrid.falcon_h1:FalconH1ForCausalLM"),
        "NemotronHForCausalLM": Family(read_nemotron_h, "baton.models.families.hybrid.nemotron_h:NemotronHForCausalLM"),
        # Layer norms.
        "GPT2LMHeadModel": Family(read_gpt2, f"{_LAYER_NORM}:GPT2LMHeadModel"),
        "GPTNeoXForCausalLM": Family(read_gpt_neox, f"{_LAYER_NORM}:GPTNeoXForCausalLM"),
        "OPTForCausalLM": Family(read_opt, f"{_LAYER_NORM}:OPTForCausalLM"),
        "Starcoder2ForCausalLM": Family(read_starcoder2, f"{_LAYER_NORM}:StarCoder2ForCausalLM"),
        "NemotronForCausalLM": Family(read_nemotron, f"{_LAYER_NORM}:LayerNormForCausalLM"),
        "MptForCausalLM": Family(read_mpt, f"{_LAYER_NORM}:MptForCausalLM"),
        "MPTForCausalLM": Family(read_mpt, f"{_LAYER_NORM}:MptForCausalLM"),
        "StableLmForCausalLM": Family(read_stablelm, "baton.models.families.dense.stablelm:StableLMForCausalLM"),
        "FalconForCausalLM": Family(read_falcon, "baton.models.families.dense.falcon:FalconForCausalLM"),
        "BloomForCausalLM": Family(read_bloom, "baton.models.families.dense.bloom:BloomForCausalLM"),
        "Phi3SmallForCausalLM": Family(read_phi3_small, "baton.models.families.dense.phi3_small:Phi3SmallForCausalLM"),
    }
)


def find_family(architecture: str) -> Family | None:
    """Returns the architecture's family, ours or a plug-in's; None if there is none.

    Raises:
        ConfigError: two register the architecture, or the plug-in is broken.
    """
    return plugins.find_registered(plugins.MODEL_FAMILIES, architecture, FAMILIES, Family)


def family_of(architecture: str) -> Family:
    """Returns the family of a model whose config was read, so it exists."""
    family = find_family(architecture)
    assert family is not None, architecture
    return family
