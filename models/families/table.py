"""The table of model families: for each architecture, its config reader and its model class."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from models.config.file import ConfigFile
from models.config.model_config import ModelConfig
from models.families.bloom_config import read_bloom
from models.families.deepseek_config import read_deepseek_v2, read_deepseek_v3
from models.families.falcon_config import read_falcon
from models.families.gemma_config import read_gemma2, read_gemma3
from models.families.gpt_oss_config import read_gpt_oss
from models.families.llama4_config import read_llama4
from models.families.llama_config import read_llama, read_mistral, read_qwen2, read_qwen3
from models.families.phi3_small_config import read_phi3_small


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        model: "module:class" of its `models.causal_lm.CausalLM`, imported on first use because reading a config must
            not import torch.
        text_config: table of config.json that holds the language model's fields, as in multimodal models.
        overflows_float16: published weights exceed float16's 65504 in the residual stream, so outputs would be NaN.
    """

    read: Callable[[ConfigFile], ModelConfig]
    model: str
    text_config: bool = False
    overflows_float16: bool = False


@dataclass(frozen=True)
class Features:
    """What docs/models.md says of an architecture, and what `models.families.nearest` compares.

    Attributes:
        special: parts that Llama does not have.
        attention: of `attention.backend.AttentionFeature`, which layers have it.
        experts: most of its models have a mixture of experts.
        latent: its KV cache is MLA's.
        layer_norm: its layers have layer norms in place of RMS norms.
    """

    special: str = ""
    attention: str = ""
    experts: bool = False
    latent: bool = False
    layer_norm: bool = False


_LLAMA = "models.families.llama:LlamaForCausalLM"
_DEEPSEEK = "models.families.deepseek:DeepseekForCausalLM"
_GEMMA = "models.families.gemma:GemmaForCausalLM"
_LLAMA4 = "models.families.llama4:Llama4ForCausalLM"

_GROUPED = "mixture of experts, chosen in groups"
_GEMMA2_PARTS = "norms before and after both halves of a layer, capped logits"
_GEMMA3_PARTS = "norms as Gemma 2 and on queries and keys, faster rotation in layers with a window"
_LLAMA4_PARTS = "mixture of experts and a shared expert, layers without positions"
_GEMMA3N_PARTS = "residuals in parallel, embeddings for each layer, layers that read another layer's KV"
_GEMMA4_PARTS = "embeddings for each layer, layers that read another layer's KV, unequal heads, mixture of experts"

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
    }
)

# A family without a row has Features(). Of a row without a family nothing is read.
FEATURES: Mapping[str, Features] = MappingProxyType(
    {
        "LlamaForCausalLM": Features("rotary embedding plain, linear, llama3 or YaRN"),
        "MistralForCausalLM": Features("", "sliding window in all layers, where the config has one"),
        "Qwen2ForCausalLM": Features("biases on q, k and v", "sliding window in some layers, where switched on"),
        "Qwen3ForCausalLM": Features("norms on queries and keys", "sliding window in some layers, where switched on"),
        "DeepseekV2ForCausalLM": Features(_GROUPED, "latent cache (MLA)", experts=True, latent=True),
        "DeepseekV3ForCausalLM": Features(_GROUPED, "latent cache (MLA)", experts=True, latent=True),
        "Gemma2ForCausalLM": Features(_GEMMA2_PARTS, "sliding window in every other layer, soft cap"),
        "Gemma3ForCausalLM": Features(_GEMMA3_PARTS, "sliding window in five of six layers"),
        "Gemma3ForConditionalGeneration": Features(_GEMMA3_PARTS, "sliding window in five of six layers"),
        "Llama4ForCausalLM": Features(_LLAMA4_PARTS, "chunked local attention in three of four layers", experts=True),
        "Llama4ForConditionalGeneration": Features(
            _LLAMA4_PARTS, "chunked local attention in three of four layers", experts=True
        ),
        "GptOssForCausalLM": Features(
            "mixture of experts with biases and clamped activation",
            "sinks, sliding window in every other layer",
            experts=True,
        ),
        "FalconForCausalLM": Features(
            "attention and MLP in sequence or in parallel", "ALiBi, or none with rotary embedding", layer_norm=True
        ),
        "BloomForCausalLM": Features("norm after the embedding, no rotary embedding", "ALiBi", layer_norm=True),
        "Phi3SmallForCausalLM": Features(
            "its own gated MLP, muP's multipliers", "block-sparse in most layers", layer_norm=True
        ),
        "GraniteForCausalLM": Features("multipliers of embedding, residuals, scores and logits"),
        "SeedOssForCausalLM": Features("biases on q, k and v"),
        "SmolLM3ForCausalLM": Features("layers without positions", "sliding window, where the config has one"),
        "Olmo2ForCausalLM": Features("norms after both halves of a layer, norms on queries and keys"),
        "Olmo3ForCausalLM": Features("as OLMo 2", "sliding window in three of four layers"),
        "Exaone4ForCausalLM": Features(
            "norms after both halves of a layer, norms on queries and keys, layers without positions",
            "sliding window in three of four layers, where the config has one",
        ),
        "Ernie4_5ForCausalLM": Features("neighbouring channels turn together"),
        "HunYuanDenseV1ForCausalLM": Features("norms on queries and keys after they turn"),
        "MinistralForCausalLM": Features("", "sliding window in some layers"),
        "Ministral3ForCausalLM": Features("queries grow with the position"),
        "Mistral3ForConditionalGeneration": Features("its language model is Mistral or Ministral"),
        "CohereForCausalLM": Features("attention and MLP in parallel, scaled logits", layer_norm=True),
        "Cohere2ForCausalLM": Features(
            "as Cohere, layers without positions", "sliding window in three of four layers", layer_norm=True
        ),
        "ApertusForCausalLM": Features("xIELU without a gate, norms on queries and keys"),
        "GlmForCausalLM": Features("rotary embedding on half of a head"),
        "Glm4ForCausalLM": Features("as GLM, norms before and after both halves of a layer"),
        "Phi3ForCausalLM": Features(
            "LongRoPE, rotary embedding on a part of a head", "sliding window, where the config has one"
        ),
        "StableLmForCausalLM": Features("rotary embedding on a part of a head", layer_norm=True),
        "Qwen2VLForConditionalGeneration": Features("its language model, with positions of text"),
        "Qwen2_5_VLForConditionalGeneration": Features("its language model, with positions of text"),
        "Qwen3VLForConditionalGeneration": Features("its language model, with positions of text"),
        "Qwen3MoeForCausalLM": Features("norms on queries and keys, mixture of experts", experts=True),
        "Qwen2MoeForCausalLM": Features("mixture of experts and a gated shared expert", experts=True),
        "MixtralForCausalLM": Features(
            "mixture of experts", "sliding window in all layers, where the config has one", experts=True
        ),
        "Glm4MoeForCausalLM": Features(_GROUPED, experts=True),
        "GraniteMoeForCausalLM": Features("multipliers as Granite, mixture of experts", experts=True),
        "Ernie4_5_MoeForCausalLM": Features("mixture of experts and shared experts", experts=True),
        "OlmoeForCausalLM": Features("norms on queries and keys, mixture of experts", experts=True),
        "MiniMaxM2ForCausalLM": Features(
            "norms on queries and keys, rotary embedding on half of a head, mixture of experts", experts=True
        ),
        "HunYuanMoEV1ForCausalLM": Features("as Hunyuan dense, mixture of experts", experts=True),
        "PhimoeForCausalLM": Features("mixture of experts by a sparse mixer", experts=True, layer_norm=True),
        "PhiMoEForCausalLM": Features("mixture of experts by a sparse mixer", experts=True, layer_norm=True),
        "Starcoder2ForCausalLM": Features("MLP without a gate", "sliding window, where switched on", layer_norm=True),
        "NemotronForCausalLM": Features("squared ReLU, rotary embedding on half of a head", layer_norm=True),
        "GPTNeoXForCausalLM": Features("attention and MLP in parallel or in sequence", layer_norm=True),
        "GPT2LMHeadModel": Features("learnt positions", layer_norm=True),
        "OPTForCausalLM": Features("learnt positions", layer_norm=True),
        "MptForCausalLM": Features("no biases", "ALiBi", layer_norm=True),
        "MPTForCausalLM": Features("no biases", "ALiBi", layer_norm=True),
        "GemmaForCausalLM": Features("scaled embedding"),
        "VaultGemmaForCausalLM": Features(
            "as Gemma 2 without the norms after", "sliding window in some layers, soft cap"
        ),
        "Gemma3nForCausalLM": Features(_GEMMA3N_PARTS, "sliding window in four of five layers"),
        "Gemma3nForConditionalGeneration": Features(_GEMMA3N_PARTS, "sliding window in four of five layers"),
        "Gemma4ForCausalLM": Features(_GEMMA4_PARTS, "sliding window in most layers"),
        "Gemma4ForConditionalGeneration": Features(_GEMMA4_PARTS, "sliding window in most layers"),
    }
)
