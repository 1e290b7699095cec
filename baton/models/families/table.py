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
    read_ministral,
    read_ministral3,
    read_mistral3,
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
from baton.models.families.dense.llama_config import read_llama, read_mistral, read_qwen2, read_qwen3
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


@dataclass(frozen=True)
class ModelFeatures:
    """The features of an architecture, which docs/models.md lists and `baton.models.families.nearest` compares.

    Attributes:
        special: parts that Llama does not have.
        attention: words for the `attention.backend.AttentionFeature`s it uses, and in which layers.
        experts: whether most of its models have a mixture of experts.
        latent: whether its KV cache is MLA's.
        layer_norm: whether its layers have layer norms instead of RMS norms.
    """

    special: str = ""
    attention: str = ""
    experts: bool = False
    latent: bool = False
    layer_norm: bool = False


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

_GROUPED = "mixture of experts, chosen in groups"
_EXAONE_MOE_PARTS = "norms on queries and keys, layers without positions, mixture of experts, chosen in groups"
_EXAONE_MOE = "sliding window in three of four layers, where the config has one"
_GEMMA2_PARTS = "norms before and after both halves of a layer, capped logits"
_GEMMA3_PARTS = "norms as Gemma 2 and on queries and keys, faster rotation in layers with a window"
_LLAMA4_PARTS = "mixture of experts and a shared expert, layers without positions"
_GEMMA3N_PARTS = "residuals in parallel, embeddings for each layer, layers that read another layer's KV"
_GEMMA4_PARTS = "embeddings for each layer, layers that read another layer's KV, unequal heads, mixture of experts"
_DELTA_PARTS = "short convolutions, gates on the outputs of attention, rotary embedding on a part of a head"
_DELTA = "gated delta rule in three of four layers"

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        # Llama's file, dense.
        "LlamaForCausalLM": Family(read_llama, _LLAMA),
        "MistralForCausalLM": Family(read_mistral, _LLAMA),
        "MinistralForCausalLM": Family(read_ministral, _LLAMA),
        "Ministral3ForCausalLM": Family(read_ministral3, _LLAMA),
        "Mistral3ForConditionalGeneration": Family(read_mistral3, _LLAMA, text_config=True),
        "Qwen2ForCausalLM": Family(read_qwen2, _LLAMA),
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

# A family without a row has ModelFeatures(). A row without a family is never read.
FEATURES: Mapping[str, ModelFeatures] = MappingProxyType(
    {
        "LlamaForCausalLM": ModelFeatures("rotary embedding plain, linear, llama3 or YaRN"),
        "MistralForCausalLM": ModelFeatures("", "sliding window in all layers, where the config has one"),
        "MinistralForCausalLM": ModelFeatures("", "sliding window in some layers"),
        "Ministral3ForCausalLM": ModelFeatures(
            "queries grow with the position", "sliding window, where the config has one"
        ),
        "Mistral3ForConditionalGeneration": ModelFeatures("its language model is Mistral or Ministral"),
        "Qwen2ForCausalLM": ModelFeatures("biases on q, k and v", "sliding window in some layers, where switched on"),
        "Qwen3ForCausalLM": ModelFeatures(
            "norms on queries and keys", "sliding window in some layers, where switched on"
        ),
        "Qwen2VLForConditionalGeneration": ModelFeatures("its language model, with positions of text"),
        "Qwen2_5_VLForConditionalGeneration": ModelFeatures("its language model, with positions of text"),
        "Qwen3VLForConditionalGeneration": ModelFeatures("its language model, with positions of text"),
        "Phi3ForCausalLM": ModelFeatures(
            "LongRoPE, rotary embedding on a part of a head", "sliding window, where the config has one"
        ),
        "SmolLM3ForCausalLM": ModelFeatures("layers without positions", "sliding window, where the config has one"),
        "SeedOssForCausalLM": ModelFeatures("biases on q, k and v"),
        "GraniteForCausalLM": ModelFeatures("multipliers of embedding, residuals, scores and logits"),
        "Olmo2ForCausalLM": ModelFeatures("norms after both halves of a layer, norms over all queries and all keys"),
        "Olmo3ForCausalLM": ModelFeatures("as OLMo 2", "sliding window in three of four layers"),
        "Exaone4ForCausalLM": ModelFeatures(
            "norms after both halves of a layer, norms on queries and keys, layers without positions",
            "sliding window in three of four layers, where the config has one",
        ),
        "Ernie4_5ForCausalLM": ModelFeatures("neighbouring channels turn together"),
        "HunYuanDenseV1ForCausalLM": ModelFeatures("norms on queries and keys after they turn"),
        "CohereForCausalLM": ModelFeatures("attention and MLP in parallel, scaled logits", layer_norm=True),
        "Cohere2ForCausalLM": ModelFeatures(
            "as Cohere, layers without positions", "sliding window in three of four layers", layer_norm=True
        ),
        "GlmForCausalLM": ModelFeatures("rotary embedding on half of a head"),
        "Glm4ForCausalLM": ModelFeatures("as GLM, norms before and after both halves of a layer"),
        "ArceeForCausalLM": ModelFeatures("squared ReLU without a gate"),
        "ApertusForCausalLM": ModelFeatures("xIELU without a gate, norms on queries and keys"),
        "MixtralForCausalLM": ModelFeatures(
            "mixture of experts", "sliding window in all layers, where the config has one", experts=True
        ),
        "Qwen2MoeForCausalLM": ModelFeatures("mixture of experts and a gated shared expert", experts=True),
        "Qwen3MoeForCausalLM": ModelFeatures("norms on queries and keys, mixture of experts", experts=True),
        "OlmoeForCausalLM": ModelFeatures("norms over all queries and all keys, mixture of experts", experts=True),
        "GraniteMoeForCausalLM": ModelFeatures("multipliers as Granite, mixture of experts", experts=True),
        "Glm4MoeForCausalLM": ModelFeatures(
            "half of each head turns, mixture of experts, chosen in groups", experts=True
        ),
        "Dots1ForCausalLM": ModelFeatures(
            "norms on queries and keys, mixture of experts, chosen in groups",
            "sliding window in some layers, where the config has one",
            experts=True,
        ),
        "SolarOpenForCausalLM": ModelFeatures("mixture of experts in all layers, chosen in groups", experts=True),
        "ExaoneMoeForCausalLM": ModelFeatures(_EXAONE_MOE_PARTS, _EXAONE_MOE, experts=True),
        "ExaoneMoEForCausalLM": ModelFeatures(_EXAONE_MOE_PARTS, _EXAONE_MOE, experts=True),
        "MiniMaxM2ForCausalLM": ModelFeatures(
            "norms over all queries and all keys, a part of each head turns, mixture of experts", experts=True
        ),
        "Ernie4_5_MoeForCausalLM": ModelFeatures("mixture of experts and shared experts", experts=True),
        "HunYuanMoEV1ForCausalLM": ModelFeatures("as Hunyuan dense, mixture of experts", experts=True),
        "Qwen3VLMoeForConditionalGeneration": ModelFeatures(
            "its language model, with positions of text, norms on queries and keys, mixture of experts", experts=True
        ),
        "DeepseekV2ForCausalLM": ModelFeatures(_GROUPED, "latent cache (MLA)", experts=True, latent=True),
        "DeepseekV3ForCausalLM": ModelFeatures(_GROUPED, "latent cache (MLA)", experts=True, latent=True),
        "Glm4MoeLiteForCausalLM": ModelFeatures(_GROUPED, "latent cache (MLA)", experts=True, latent=True),
        "KimiK25ForConditionalGeneration": ModelFeatures(
            "mixture of experts without groups", "latent cache (MLA)", experts=True, latent=True
        ),
        "LongcatFlashForCausalLM": ModelFeatures(
            "two attentions and two MLPs in a layer, experts in parallel to half of it, some of them without weights",
            "latent cache (MLA)",
            experts=True,
            latent=True,
        ),
        "DeepseekV32ForCausalLM": ModelFeatures(_GROUPED, "latent cache (MLA), sparse", experts=True, latent=True),
        "GlmMoeDsaForCausalLM": ModelFeatures(
            "as DeepSeek-V3.2, layers that share what one selected",
            "latent cache (MLA), sparse",
            experts=True,
            latent=True,
        ),
        "Llama4ForCausalLM": ModelFeatures(
            _LLAMA4_PARTS, "chunked local attention in three of four layers", experts=True
        ),
        "Llama4ForConditionalGeneration": ModelFeatures(
            _LLAMA4_PARTS, "chunked local attention in three of four layers", experts=True
        ),
        "MiMoV2FlashForCausalLM": ModelFeatures(
            "values narrower than keys, rotary embedding on a third of a head, mixture of experts",
            "sinks and sliding window in five of six layers, which have twice the kv heads",
            experts=True,
        ),
        "GptOssForCausalLM": ModelFeatures(
            "mixture of experts with biases and clamped activation",
            "sinks, sliding window in every other layer",
            experts=True,
        ),
        "PhimoeForCausalLM": ModelFeatures("mixture of experts by a sparse mixer", experts=True, layer_norm=True),
        "PhiMoEForCausalLM": ModelFeatures("mixture of experts by a sparse mixer", experts=True, layer_norm=True),
        "Lfm2ForCausalLM": ModelFeatures("gated short convolutions in most layers, norms on queries and keys"),
        "Lfm2MoeForCausalLM": ModelFeatures(
            "gated short convolutions in most layers, norms on queries and keys, mixture of experts", experts=True
        ),
        "GemmaForCausalLM": ModelFeatures("scaled embedding"),
        "VaultGemmaForCausalLM": ModelFeatures(
            "as Gemma 2 without the norms after", "sliding window in some layers, soft cap"
        ),
        "Gemma2ForCausalLM": ModelFeatures(_GEMMA2_PARTS, "sliding window in every other layer, soft cap"),
        "Gemma3ForCausalLM": ModelFeatures(_GEMMA3_PARTS, "sliding window in five of six layers"),
        "Gemma3ForConditionalGeneration": ModelFeatures(_GEMMA3_PARTS, "sliding window in five of six layers"),
        "Gemma3nForCausalLM": ModelFeatures(_GEMMA3N_PARTS, "sliding window in four of five layers"),
        "Gemma3nForConditionalGeneration": ModelFeatures(_GEMMA3N_PARTS, "sliding window in four of five layers"),
        "Gemma4ForCausalLM": ModelFeatures(_GEMMA4_PARTS, "sliding window in most layers"),
        "Gemma4ForConditionalGeneration": ModelFeatures(_GEMMA4_PARTS, "sliding window in most layers"),
        "Qwen3NextForCausalLM": ModelFeatures(_DELTA_PARTS, _DELTA, experts=True),
        "Qwen3_5ForCausalLM": ModelFeatures(_DELTA_PARTS, _DELTA),
        "Qwen3_5ForConditionalGeneration": ModelFeatures(_DELTA_PARTS, _DELTA),
        "Qwen3_5MoeForCausalLM": ModelFeatures(_DELTA_PARTS, _DELTA, experts=True),
        "Qwen3_5MoeForConditionalGeneration": ModelFeatures(_DELTA_PARTS, _DELTA, experts=True),
        "KimiLinearForCausalLM": ModelFeatures(
            "short convolutions, mixture of experts, no positions",
            "Kimi delta attention in three of four layers, latent cache (MLA) in the others",
            experts=True,
            latent=True,
        ),
        "GraniteMoeHybridForCausalLM": ModelFeatures(
            "Mamba-2 layers, layers without positions, mixture of experts and a shared MLP, multipliers as Granite",
            experts=True,
        ),
        "BambaForCausalLM": ModelFeatures("Mamba-2 layers, half of each head turns"),
        "FalconH1ForCausalLM": ModelFeatures(
            "Mamba-2 and attention in parallel in each layer, muP's multipliers of all parts"
        ),
        "NemotronHForCausalLM": ModelFeatures(
            "layers of Mamba-2, attention, an MLP or a mixture of experts, without positions and gates"
        ),
        "GPT2LMHeadModel": ModelFeatures("learnt positions", layer_norm=True),
        "GPTNeoXForCausalLM": ModelFeatures("attention and MLP in parallel or in sequence", layer_norm=True),
        "OPTForCausalLM": ModelFeatures("learnt positions", layer_norm=True),
        "Starcoder2ForCausalLM": ModelFeatures(
            "MLP without a gate", "sliding window, where switched on", layer_norm=True
        ),
        "NemotronForCausalLM": ModelFeatures("squared ReLU, rotary embedding on half of a head", layer_norm=True),
        "MptForCausalLM": ModelFeatures("no biases", "ALiBi", layer_norm=True),
        "MPTForCausalLM": ModelFeatures("no biases", "ALiBi", layer_norm=True),
        "StableLmForCausalLM": ModelFeatures("rotary embedding on a part of a head", layer_norm=True),
        "FalconForCausalLM": ModelFeatures(
            "attention and MLP in sequence or in parallel", "ALiBi, or none with rotary embedding", layer_norm=True
        ),
        "BloomForCausalLM": ModelFeatures("norm after the embedding, no rotary embedding", "ALiBi", layer_norm=True),
        "Phi3SmallForCausalLM": ModelFeatures(
            "its own gated MLP, muP's multipliers", "block-sparse in most layers", layer_norm=True
        ),
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
