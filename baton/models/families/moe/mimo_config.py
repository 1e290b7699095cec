"""Reads config.json of MiMo-V2-Flash in its publisher's and in transformers' form.

The two forms use different fields for the same values. If a file has both, they must agree.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, Literal

from baton.models.config.fields import Count, CountOrZero, Fraction, Heads, Integers, Positive, Size, Texts
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import GQAConfig, ModelConfig, MoEConfig, Scoring, TopKMethod
from baton.models.config.rope import RopeConfig, read_rope
from baton.models.families.latent.deepseek_config import GroupedExpertFields

_FULL, _SLIDING = "full_attention", "sliding_attention"
_EVERY = 6  # each such layer sees all tokens, and so does the first layer
_TURNING = 0.334  # the part of a head that turns, unless a table of rope_parameters has one


@dataclass(frozen=True)
class MiMoSwitches:
    """The options of a MiMo.

    Attributes:
        value_scale: factor of values.
    """

    value_scale: float


class _MiMoFields(GroupedExpertFields):
    partial_rotary: ClassVar[bool] = True
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType(
        {
            "vocab_size": 152_576,
            "hidden_size": 4096,
            "intermediate_size": 16_384,
            "num_hidden_layers": 48,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "max_position_embeddings": 131_072,
        }
    )
    num_key_value_heads: Heads
    n_routed_experts: Heads
    rms_norm_eps: Positive = 1e-5
    layernorm_epsilon: Positive | None = None
    attention_bias: bool = False
    head_dim: Size = 192
    v_head_dim: Size = 128
    attention_value_scale: Positive | None = 0.707
    sliding_window: Count = 129
    sliding_window_size: Count | None = None
    attention_chunk_size: CountOrZero | None = None  # no published code reads it
    hybrid_layer_pattern: Integers = ()
    moe_layer_freq: Integers = ()
    mlp_layer_types: Texts = ()
    swa_num_attention_heads: Heads | None = None
    swa_num_key_value_heads: Heads | None = None
    swa_head_dim: Size | None = None
    swa_v_head_dim: Size | None = None
    add_full_attention_sink_bias: Literal[False] = False
    add_swa_attention_sink_bias: Literal[True] = True
    use_qk_norm: Literal[False] = False
    partial_rotary_factor: Fraction = _TURNING
    rope_theta: Positive = 5_000_000.0
    swa_rope_theta: Positive = 10_000.0
    n_shared_experts: Literal[0] = 0
    n_group: Heads = 1
    topk_group: Heads = 1
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    scoring_func: Literal["sigmoid"] = "sigmoid"
    norm_topk_prob: bool = True
    routed_scaling_factor: Positive = 1.0

    def attention(self) -> GQAConfig:
        if self.v_head_dim > self.head_dim:
            raise self.refuse("v_head_dim", f"up to head_dim, {self.head_dim}")
        for name in ("num_attention_heads", "head_dim", "v_head_dim"):
            if getattr(self, f"swa_{name}") not in (None, getattr(self, name)):
                raise self.refuse(f"swa_{name}", f"{name}, {getattr(self, name)}")
        windows = self.windows()
        kv_heads, sliding = self.num_key_value_heads, self.swa_num_key_value_heads or 2 * self.num_key_value_heads
        heads = tuple((kv_heads if window is None else sliding, self.head_dim) for window in windows)
        largest = max(each for each, _ in heads)
        if any(largest % each for each, _ in heads):
            raise self.refuse("swa_num_key_value_heads", "a multiple or a divisor of num_key_value_heads")
        gqa = self.gqa(
            windows=windows, num_kv_heads=largest, qkv_bias=self.attention_bias, output_bias=False, sinks=any(windows)
        )
        narrow = self.v_head_dim if self.v_head_dim < self.head_dim else None
        return replace(gqa, layer_heads=heads if len(set(heads)) > 1 else (), v_head_dim=narrow)

    def windows(self) -> tuple[int | None, ...]:
        """Returns each layer's window.

        NOTE: as in transformers, `sliding_window_size` does not count the token itself, and takes precedence over
        `sliding_window`, which does.
        """
        num_layers = self.num_hidden_layers
        slides = [kind == _SLIDING for kind in self.types_of_layers(_FULL, _SLIDING)]
        pattern = [kind == 1 for kind in self.hybrid_layer_pattern]
        if pattern and (len(pattern) != num_layers or max(self.hybrid_layer_pattern) > 1):
            raise self.refuse("hybrid_layer_pattern", f"0 or 1 for each of {num_layers} layers")
        if slides and pattern and slides != pattern:
            raise self.refuse("hybrid_layer_pattern", "1 for the layers of layer_types that are sliding_attention")
        slides = slides or pattern or [index > 0 and (index + 1) % _EVERY > 0 for index in range(num_layers)]
        window = self.sliding_window if self.sliding_window_size is None else self.sliding_window_size + 1
        return tuple(window if slide else None for slide in slides)

    def ropes(self) -> tuple[RopeConfig, RopeConfig]:
        """Returns the rotary embeddings of layers without and with a window."""
        if self.rope_scaling:
            raise self.refuse("rope_scaling", "null")
        table = self.table("rope_parameters")
        if unknown := sorted(set(table.values) - {_FULL, _SLIDING}):
            raise table.refuse(unknown[0], "null", cure=f"this family has tables: {_FULL}, {_SLIDING}")
        return self._rope(table.table(_FULL), self.rope_theta), self._rope(table.table(_SLIDING), self.swa_rope_theta)

    def _rope(self, table: ConfigFile, theta: float) -> RopeConfig:
        rope = read_rope(
            table,
            dim=self.head_dim,
            theta=theta,
            interleaved=False,
            max_position_embeddings=self.max_position_embeddings,
            partial_rotary_factor=_TURNING if table.values else self.partial_rotary_factor,
        )
        if rope.scaling is not None:
            raise table.refuse("rope_type", "default")
        return rope

    def experts(self) -> MoEConfig | None:
        layers = tuple(index > 0 for index in range(self.num_hidden_layers))
        if self.moe_layer_freq:
            layers = tuple(each == 1 for each in self.moe_layer_freq)
            if len(layers) != self.num_hidden_layers or max(self.moe_layer_freq) > 1:
                raise self.refuse("moe_layer_freq", f"0 or 1 for each of {self.num_hidden_layers} layers")
        if self.mlp_layer_types:
            by_type = self.layers_by_type(self.mlp_layer_types)
            if self.moe_layer_freq and by_type != layers:
                raise self.refuse("moe_layer_freq", "1 for the layers of mlp_layer_types that are sparse")
            layers = by_type
        moe = self.moe(
            scoring=Scoring.SIGMOID,
            method=TopKMethod.NOAUX_TC,
            normalize_weights=self.norm_topk_prob,
            weight_scale=self.routed_scaling_factor,
        )
        return replace(moe, layers=layers) if moe is not None and any(layers) else None

    def norm_eps(self) -> float:
        eps = self.rms_norm_eps if self.layernorm_epsilon is None else self.layernorm_epsilon
        if self._file.raw("rms_norm_eps") not in (None, eps):
            raise self.refuse("rms_norm_eps", f"layernorm_epsilon, {eps:g}")
        return eps


def read_mimo(file: ConfigFile) -> ModelConfig:
    fields = _MiMoFields.read(file)
    rope, local_rope = fields.ropes()
    scale = fields.attention_value_scale
    return fields.model(
        attention=fields.attention(),
        rope=rope,
        local_rope=local_rope,
        intermediate_size=fields.intermediate_size,
        norm_eps=fields.norm_eps(),
        moe=fields.experts(),
        switches=MiMoSwitches(1.0 if scale is None else scale),
    )
