"""Reads config.json of dense families that Llama's file computes with switches."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from baton.models.config.fields import Count, CountOrZero, Integers, Positive, Size
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import GQAConfig, ModelConfig, QKNorm
from baton.models.families.dense.llama_config import LlamaLikeFields
from baton.models.families.dense.llama_switches import LlamaSwitches, Norms


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
        """Whether each layer has rotation. `no_rope_layers` has a 1 for layers that do; without it, every fourth layer
        has none."""
        flags, num_layers = self.no_rope_layers, self.num_hidden_layers
        if flags is None:
            return tuple((index + 1) % self.no_rope_layer_interval > 0 for index in range(num_layers))
        if len(flags) < num_layers or not set(flags) <= {0, 1}:
            raise self.refuse("no_rope_layers", f"1 or 0 for each of {num_layers} layers")
        return tuple(flag == 1 for flag in flags[:num_layers])

    def windows(self, rotary_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
        """Returns windows for the layers that `layer_types` names; without it, for the layers without rotation."""
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


class _Olmo2Fields(LlamaLikeFields):
    rms_norm_eps: Positive = 1e-5
    attention_bias: bool = False

    def attention(self, windows: tuple[int | None, ...]) -> GQAConfig:
        bias = self.attention_bias
        return self.gqa(windows=windows, qkv_bias=bias, output_bias=bias, qk_norm=True, qk_norm_of=QKNorm.ROW)


def read_olmo2(file: ConfigFile) -> ModelConfig:
    fields = _Olmo2Fields.read(file)
    attention = fields.attention(fields.uniform_windows(None))
    return fields.llama_like(attention, mlp_bias=False, switches=LlamaSwitches(norms=Norms.AFTER))


class _Olmo3Fields(_Olmo2Fields):
    rope_theta: Positive = 500_000.0
    sliding_window: Count | None = 4096


def read_olmo3(file: ConfigFile) -> ModelConfig:
    fields = _Olmo3Fields.read(file)
    attention = fields.attention(fields.windows_by_type(fields.sliding_window, every=4))
    rope, local_rope = fields.ropes_by_type(dim=attention.head_dim)
    return fields.model(
        attention=attention,
        rope=rope,
        local_rope=local_rope,
        intermediate_size=fields.intermediate_size,
        mlp_bias=False,
        switches=LlamaSwitches(norms=Norms.AFTER),
    )


class ExaoneFields(LlamaLikeFields):
    """The fields of EXAONE's attention, with and without experts."""

    rms_norm_eps: Positive = 1e-5
    sliding_window: Count | None = 4096
    sliding_window_pattern: CountOrZero | str | None = 4

    def windows(self) -> tuple[int | None, ...]:
        """Returns windows by `layer_types`; without it, for all layers but each `sliding_window_pattern`-th."""
        every = self.sliding_window_pattern
        if not self.layer_types and self.sliding_window is None:
            return self.uniform_windows(None)
        if not self.layer_types and (isinstance(every, str) or not every):
            raise self.refuse("sliding_window_pattern", "an integer of at least 1", cure="or give layer_types")
        return self.windows_by_type(self.sliding_window, every=1 if isinstance(every, str) or not every else every)

    def attention(self) -> GQAConfig:
        """Returns the attention. A model with windows turns queries and keys only in layers with a window."""
        windows = self.windows()
        turns = () if self.sliding_window is None else tuple(window is not None for window in windows)
        return self.gqa(windows=windows, qkv_bias=False, output_bias=False, qk_norm=True, rotary_layers=turns)


def read_exaone4(file: ConfigFile) -> ModelConfig:
    fields = ExaoneFields.read(file)
    return fields.llama_like(fields.attention(), mlp_bias=False, switches=LlamaSwitches(norms=Norms.AFTER))


class _Ernie45Fields(LlamaLikeFields):
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 500_000.0
    head_dim: Size | None = 128
    tie_word_embeddings: bool = True
    use_bias: bool = False


def read_ernie4_5(file: ConfigFile) -> ModelConfig:
    fields = _Ernie45Fields.read(file)
    bias, windows = fields.use_bias, fields.uniform_windows(None)
    attention = fields.gqa(windows=windows, qkv_bias=bias, output_bias=bias)
    return fields.llama_like(attention, interleaved=True, mlp_bias=bias)


class _HunYuanFields(LlamaLikeFields):
    rms_norm_eps: Positive = 1e-5
    attention_bias: bool = False
    use_qk_norm: Literal[True] = True
    use_cla: Literal[False] = False


def read_hunyuan_dense(file: ConfigFile) -> ModelConfig:
    fields = _HunYuanFields.read(file)
    bias, windows = fields.attention_bias, fields.uniform_windows(None)
    attention = fields.gqa(
        windows=windows, qkv_bias=bias, output_bias=bias, qk_norm=True, qk_norm_of=QKNorm.TURNED_HEAD
    )
    return fields.llama_like(attention, mlp_bias=False)


class _CohereFields(LlamaLikeFields):
    tie_word_embeddings: bool = True
    layer_norm_eps: Positive = 1e-5
    logit_scale: Positive = 0.0625
    attention_bias: bool = False

    def cohere(self, attention: GQAConfig) -> ModelConfig:
        switches = LlamaSwitches(norms=Norms.SHARED, logits_multiplier=self.logit_scale)
        return self.llama_like(
            attention, interleaved=True, mlp_bias=False, norm_eps=self.layer_norm_eps, switches=switches
        )


class _Cohere1Fields(_CohereFields):
    rope_theta: Positive = 500_000.0
    use_qk_norm: bool = False


def read_cohere(file: ConfigFile) -> ModelConfig:
    fields = _Cohere1Fields.read(file)
    bias, windows = fields.attention_bias, fields.uniform_windows(None)
    return fields.cohere(
        fields.gqa(
            windows=windows,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=fields.use_qk_norm,
            qk_norm_of=QKNorm.OWN_WEIGHTS,
        )
    )


class _Cohere2Fields(_CohereFields):
    use_qk_norm: Literal[False] = False
    use_gated_activation: Literal[True] = True
    use_parallel_block: Literal[True] = True
    sliding_window: Count | None = 4096
    sliding_window_pattern: Count = 4


def read_cohere2(file: ConfigFile) -> ModelConfig:
    fields = _Cohere2Fields.read(file)
    bias, windows = (
        fields.attention_bias,
        fields.windows_by_type(fields.sliding_window, every=fields.sliding_window_pattern),
    )
    rotary_layers = tuple(window is not None for window in windows)
    return fields.cohere(fields.gqa(windows=windows, qkv_bias=bias, output_bias=bias, rotary_layers=rotary_layers))


class _ApertusFields(LlamaLikeFields):
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType({"rope_theta": 12_000_000.0})
    hidden_act: Literal["xielu"] = "xielu"
    qk_norm: Literal[True] = True
    post_norm: Literal[False] = False
    rms_norm_eps: Positive = 1e-5
    attention_bias: bool = False

    def rope_table(self) -> ConfigFile:
        """Returns the file's table, or Llama 3's if the file has none."""
        table = super().rope_table()
        return table if table.values else ConfigFile(table.where, _APERTUS_ROPE)


_APERTUS_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read_apertus(file: ConfigFile) -> ModelConfig:
    fields = _ApertusFields.read(file)
    bias, windows = fields.attention_bias, fields.uniform_windows(None)
    attention = fields.gqa(windows=windows, qkv_bias=bias, output_bias=bias, qk_norm=True)
    return fields.llama_like(attention, mlp_bias=False, switches=LlamaSwitches(xielu_mlp=True))


class _ArceeFields(LlamaLikeFields):
    hidden_act: Literal["relu2"] = "relu2"
    rms_norm_eps: Positive = 1e-5
    attention_bias: bool = False


def read_arcee(file: ConfigFile) -> ModelConfig:
    fields = _ArceeFields.read(file)
    bias, windows = fields.attention_bias, fields.uniform_windows(None)
    attention = fields.gqa(windows=windows, qkv_bias=bias, output_bias=bias)
    return fields.llama_like(attention, switches=LlamaSwitches(squared_relu_mlp=True))


class _GlmFields(LlamaLikeFields):
    partial_rotary: ClassVar[bool] = True
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType({"partial_rotary_factor": 0.5, "head_dim": 128})
    rms_norm_eps: Positive = 1.5625e-7
    attention_bias: bool = True

    def glm(self, norms: Norms) -> ModelConfig:
        attention = self.gqa(windows=self.uniform_windows(None), qkv_bias=self.attention_bias, output_bias=False)
        switches = LlamaSwitches(norms=norms, in_one_tensor=("gate_up_proj",))
        return self.llama_like(attention, interleaved=True, mlp_bias=False, switches=switches)


def read_glm(file: ConfigFile) -> ModelConfig:
    return _GlmFields.read(file).glm(Norms.BEFORE)


def read_glm4(file: ConfigFile) -> ModelConfig:
    return _GlmFields.read(file).glm(Norms.AROUND)
