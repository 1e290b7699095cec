"""Reads config.json of Gemma 1, Gemma-2, Gemma-3's text model, and VaultGemma."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, Literal

from baton.models.config.decoder import RotaryFields
from baton.models.config.fields import Count, Fields, Positive, Size, Table
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.config.rope import RopeConfig, read_rope

_UNMENTIONED = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA3_ROPES = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True)
class NormsBefore:
    """The options of a model with norms before both halves of a layer and none after them.

    Attributes:
        mlp_norm: checkpoints' name of the norm before the MLP.
    """

    mlp_norm: str


class _Gemma1Fields(RotaryFields):
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType(
        {
            "vocab_size": 256_000,
            "hidden_size": 3072,
            "intermediate_size": 24_576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        }
    )
    intermediate_size: Size
    quantization_config: Table | None = None
    # NOTE: the first files say gelu but mean its approximation, with which the model was trained.
    hidden_act: Literal["gelu_pytorch_tanh", "gelu"] = "gelu_pytorch_tanh"
    hidden_activation: Literal["gelu_pytorch_tanh"] | None = None
    use_bidirectional_attention: Literal[False] | None = None
    attention_bias: bool = False


def read_gemma1(file: ConfigFile) -> ModelConfig:
    fields = _Gemma1Fields.read(file)
    bias, windows = fields.attention_bias, fields.uniform_windows(None)
    attention = fields.gqa(windows=windows, qkv_bias=bias, output_bias=bias)
    return fields.model(
        attention=attention,
        rope=fields.rope(dim=attention.head_dim),
        intermediate_size=fields.intermediate_size,
        switches=NormsBefore("post_attention_layernorm"),
    )


class _GemmaFields(RotaryFields):
    intermediate_size: Size
    quantization_config: Table | None = None
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    use_bidirectional_attention: Literal[False] = False
    attention_bias: bool = False
    query_pre_attn_scalar: Positive
    sliding_window: Count | None
    final_logit_softcapping: Positive | None = None

    def attention(self, *, every: int, qk_norm: bool, soft_cap: float | None) -> GQAConfig:
        return self.gqa(
            windows=self.windows_by_type(self.sliding_window, every=every),
            qkv_bias=self.attention_bias,
            output_bias=self.attention_bias,
            qk_norm=qk_norm,
            scale=self.query_pre_attn_scalar**-0.5,
            logits_soft_cap=soft_cap,
        )


class _Gemma2Fields(_GemmaFields):
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType(
        {
            **_UNMENTIONED,
            "vocab_size": 256_000,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        }
    )
    attn_logit_softcapping: Positive | None = None


def read_gemma2(file: ConfigFile) -> ModelConfig:
    return _gemma2(file, None)


def read_vault_gemma(file: ConfigFile) -> ModelConfig:
    return _gemma2(file, NormsBefore("pre_feedforward_layernorm"))


def _gemma2(file: ConfigFile, switches: NormsBefore | None) -> ModelConfig:
    fields = _Gemma2Fields.read(file)
    attention = fields.attention(every=2, qk_norm=False, soft_cap=fields.attn_logit_softcapping)
    return fields.model(
        attention=attention,
        rope=fields.rope(dim=attention.head_dim),
        intermediate_size=fields.intermediate_size,
        final_logits_soft_cap=fields.final_logit_softcapping,
        switches=switches,
    )


class LocalRopeFields(RotaryFields):
    """The fields of families that rotate faster in layers with a window."""

    rope_theta: Positive = 1_000_000.0
    rope_local_base_freq: Positive = 10_000.0

    def ropes(self, *, dim: int) -> tuple[RopeConfig, RopeConfig]:
        """Returns the rotary embeddings of layers without and with a window. Newer files have a table for each; in
        older files `rope_scaling` is for layers without a window."""
        table = self.rope_table()
        local = ConfigFile(table.where, {})
        if self.rope_parameters is not None:
            given = [name for name, value in table.values.items() if value is not None]
            if unknown := sorted(set(given) - _GEMMA3_ROPES):
                cure = f"this family has tables: {', '.join(sorted(_GEMMA3_ROPES))}"
                raise table.refuse(unknown[0], "null", cure=cure)
            table, local = table.table("full_attention"), table.table("sliding_attention")

        def rope(table: ConfigFile, theta: float) -> RopeConfig:
            context = self.max_position_embeddings
            return read_rope(table, dim=dim, theta=theta, interleaved=False, max_position_embeddings=context)

        return rope(table, self.rope_theta), rope(local, self.rope_local_base_freq)


class _Gemma3Fields(LocalRopeFields, _GemmaFields):
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType(
        {
            **_UNMENTIONED,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
        }
    )
    # NOTE: the reference ignores this field in the attention of this family, so no right answer exists.
    attn_logit_softcapping: None = None
    sliding_window_pattern: Count = 6


def read_gemma3(file: ConfigFile) -> ModelConfig:
    fields = _Gemma3Fields.read(file)
    attention = fields.attention(every=fields.sliding_window_pattern, qk_norm=True, soft_cap=None)
    rope, local_rope = fields.ropes(dim=attention.head_dim)
    return fields.model(
        attention=attention,
        rope=rope,
        local_rope=local_rope,
        intermediate_size=fields.intermediate_size,
        final_logits_soft_cap=fields.final_logit_softcapping,
    )


def with_shared_kv(fields: Fields, attention: GQAConfig, num_layers: int) -> GQAConfig:
    """Returns the attention with last layers that have no keys and values of their own."""
    windows = attention.sliding_windows
    owned = len(windows) - num_layers
    if owned < 1 or set(windows[owned:]) - set(windows[:owned]):
        cure = "before the layers that share keys and values there has to be one of each kind"
        raise fields.refuse("num_kv_shared_layers", cure=cure)
    return replace(attention, kv_shared_layers=num_layers)
