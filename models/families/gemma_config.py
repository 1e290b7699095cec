"""config.json of Gemma-2 and of Gemma-3's text model. No torch."""

from collections.abc import Mapping
from types import MappingProxyType

from models.config.fields import read_gqa, read_model, read_model_rope, read_windows_by_type
from models.config.file import ConfigFile
from models.config.model_config import GQAConfig, ModelConfig
from models.config.rope import RopeConfig, read_rope_table, refuse_both_spellings

_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
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
)
_GEMMA2_DEFAULTS = {
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3_ROPES = frozenset({"full_attention", "sliding_attention"})
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}


def read_gemma2(file: ConfigFile, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    file = file.with_defaults({**_DEFAULTS, **_GEMMA2_DEFAULTS})
    attention = _attention(file, every=2, qk_norm=False)
    return read_model(
        file,
        architecture,
        eos,
        attention=attention,
        rope=read_model_rope(file, dim=attention.head_dim),
        final_logits_soft_cap=_cap(file, "final_logit_softcapping"),
    )


def read_gemma3(file: ConfigFile, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    file = file.with_defaults({**_DEFAULTS, **_GEMMA3_DEFAULTS})
    # NOTE: the reference ignores this field in the attention of this family, so no right answer exists.
    if "attn_logit_softcapping" in file:
        raise file.refuse("attn_logit_softcapping", "null")
    attention = _attention(file, every=file.integer("sliding_window_pattern", 6), qk_norm=True)
    rope, local_rope = _gemma3_ropes(file, dim=attention.head_dim)
    return read_model(
        file,
        architecture,
        eos,
        attention=attention,
        rope=rope,
        local_rope=local_rope,
        final_logits_soft_cap=_cap(file, "final_logit_softcapping"),
    )


def _attention(file: ConfigFile, *, every: int, qk_norm: bool) -> GQAConfig:
    for name in ("hidden_act", "hidden_activation"):
        file.choice(name, {"gelu_pytorch_tanh": None}, "gelu_pytorch_tanh")
    if file.flag("use_bidirectional_attention"):
        raise file.refuse("use_bidirectional_attention", "false")
    bias = file.flag("attention_bias")
    return read_gqa(
        file,
        windows=read_windows_by_type(file, every=every),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=qk_norm,
        scale=file.positive("query_pre_attn_scalar") ** -0.5,
        logits_soft_cap=_cap(file, "attn_logit_softcapping"),
    )


def _cap(file: ConfigFile, name: str) -> float | None:
    return file.positive(name) if name in file else None


def _gemma3_ropes(file: ConfigFile, *, dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Of the layers that see everything, and of those with a window: newer files have a table for each; in older ones
    `rope_scaling` is of the former only."""
    refuse_both_spellings(file)
    tables = file.table("rope_parameters")
    if unknown := sorted(tables.names() - _GEMMA3_ROPES):
        raise tables.refuse(unknown[0], "null", cure=f"this family has tables: {', '.join(sorted(_GEMMA3_ROPES))}")
    full = tables.table("full_attention") if "rope_parameters" in file else file.table("rope_scaling")
    local = tables.table("sliding_attention")
    max_positions = file.integer("max_position_embeddings")

    def rope(table: ConfigFile, theta: str) -> RopeConfig:
        return read_rope_table(
            table, dim=dim, theta=file.positive(theta), interleaved=False, max_position_embeddings=max_positions
        )

    return rope(full, "rope_theta"), rope(local, "rope_local_base_freq")
