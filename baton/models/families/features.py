"""What is special about each model family: for docs/models.md, and to find the nearest family of an unknown model."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


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
        "MiMoForCausalLM": ModelFeatures("biases on q, k and v", "sliding window in some layers, where switched on"),
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
