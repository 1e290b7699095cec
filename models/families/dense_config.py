"""config.json of dense families that Llama's file computes with other switches than Llama's."""

from models.config.fields import Count, Integers, Positive, Size
from models.config.file import ConfigFile
from models.config.model_config import ModelConfig
from models.families.llama_config import LlamaLikeFields
from models.families.llama_switches import LlamaSwitches


class _GraniteFields(LlamaLikeFields):
    attention_bias: bool = False
    embedding_multiplier: Positive = 1.0
    residual_multiplier: Positive = 1.0
    attention_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0


def read_granite(file: ConfigFile) -> ModelConfig:
    fields = _GraniteFields.read(file)
    bias, windows = fields.attention_bias, fields.uniform_windows(None)
    switches = LlamaSwitches(
        embedding_multiplier=fields.embedding_multiplier,
        residual_multiplier=fields.residual_multiplier,
        logits_multiplier=1 / fields.logits_scaling,
    )
    attention = fields.gqa(windows=windows, qkv_bias=bias, output_bias=bias, scale=fields.attention_multiplier)
    return fields.llama_like(attention, switches=switches)


class _SeedOssFields(LlamaLikeFields):
    head_dim: Size | None = 128
    attention_bias: bool = True
    attention_out_bias: bool = False


def read_seed_oss(file: ConfigFile) -> ModelConfig:
    fields = _SeedOssFields.read(file)
    windows = fields.uniform_windows(None)
    return fields.llama_like(
        fields.gqa(windows=windows, qkv_bias=fields.attention_bias, output_bias=fields.attention_out_bias)
    )


class _SmolLM3Fields(LlamaLikeFields):
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    rope_theta: Positive = 2_000_000.0
    use_sliding_window: bool = False
    sliding_window: Count | None = None
    no_rope_layers: Integers | None = None
    no_rope_layer_interval: Count = 4

    def rotary_layers(self) -> tuple[bool, ...]:
        """`no_rope_layers` has a 1 for each layer with rotation; without it, each layer but every fourth has one."""
        flags, num_layers = self.no_rope_layers, self.num_hidden_layers
        if flags is None:
            return tuple((index + 1) % self.no_rope_layer_interval > 0 for index in range(num_layers))
        if len(flags) < num_layers or not set(flags) <= {0, 1}:
            raise self.refuse("no_rope_layers", f"1 or 0 for each of {num_layers} layers")
        return tuple(flag == 1 for flag in flags[:num_layers])

    def windows(self, rotary_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
        """Of the layers that `layer_types` names; without it, of the layers without rotation."""
        window = self.sliding_window if self.use_sliding_window else None
        slides = [kind == "sliding_attention" for kind in self.types_of_layers("full_attention", "sliding_attention")]
        if any(slides) and window is None:
            raise self.refuse("use_sliding_window", "true, with sliding_window", cure="layer_types has a window")
        slides = slides or [not turns for turns in rotary_layers]
        return tuple(window if slide else None for slide in slides)


def read_smollm3(file: ConfigFile) -> ModelConfig:
    fields = _SmolLM3Fields.read(file)
    bias, rotary_layers = fields.attention_bias, fields.rotary_layers()
    windows = fields.windows(rotary_layers)
    return fields.llama_like(fields.gqa(windows=windows, qkv_bias=bias, output_bias=bias, rotary_layers=rotary_layers))
