"""Reads config.json of Granite 4, Bamba and Nemotron-H, which have Mamba-2 layers, and attention in some layers."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from baton.models.config.decoder import DecoderFields
from baton.models.config.fields import AtLeastZero, Count, CountOrZero, Fraction, Heads, Integers, Positive, Size, Texts
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import ModelConfig, MoEConfig, Scoring, TopKMethod
from baton.models.config.recurrent import RecurrentConfig
from baton.models.families.dense.llama_config import LlamaLikeFields
from baton.models.families.moe.moe_config import RoutedFields

_MAMBA, _ATTENTION = "linear_attention", "full_attention"
# Older files' names of the kinds of layers.
_KINDS = {"mamba": _MAMBA, "mamba2": _MAMBA, "attention": _ATTENTION}
_LETTERS = {"M": _MAMBA, "*": _ATTENTION, "-": "mlp", "E": "moe"}


@dataclass(frozen=True)
class MambaSwitches:
    """The options of Mamba-2 layers, and factors of other parts of the model.

    Attributes:
        head_dim: channels of a head.
        state_size: numbers per channel in the state.
        conv_width: number of tokens that the short convolution before the scan sees, the token itself included.
        dt_min, dt_max: limits of a token's step in time.
        embedding_multiplier, residual_multiplier, logits_multiplier: of embeddings, of each half's update to the
            residual stream, and of logits.
        kinds: each layer's kind, if layers are a single part: "linear_attention", "full_attention", "mlp" or "moe".
        latent_size: channels of routed experts' inputs and outputs, if these are projected; 0: the model's.
        gated_norm: the scan's outputs are gated, then normed by groups; otherwise they are only gated.
        input_multiplier, part_multipliers: of a mixer's input, and of the five parts of its projection: gate, inputs,
            B, C and steps in time; () leaves the parts unchanged.
    """

    head_dim: int
    state_size: int
    conv_width: int
    conv_bias: bool
    projection_bias: bool
    dt_min: float
    dt_max: float
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    kinds: tuple[str, ...] = ()
    latent_size: int = 0
    gated_norm: bool = True
    input_multiplier: float = 1.0
    part_multipliers: tuple[float, ...] = ()

    @property
    def conv_channels(self) -> int:
        """The number of a head's channels that pass the convolution: its inputs, B and C."""
        return self.head_dim + 2 * self.state_size

    @property
    def conv_numbers(self) -> int:
        """The number of the convolution's last inputs, which come first in a head's state; the matrix follows."""
        return self.conv_channels * (self.conv_width - 1)

    def recurrent(
        self, layers: tuple[bool, ...], *, num_heads: int, num_groups: int, has_kv: tuple[bool, ...] = ()
    ) -> RecurrentConfig:
        head_channels = self.conv_numbers + self.head_dim * self.state_size
        return RecurrentConfig(layers, num_heads, head_channels, has_kv=has_kv, num_groups=num_groups)


def _check_groups(fields: DecoderFields, num_heads: int, num_groups: int, name: str) -> None:
    if num_heads % num_groups:
        raise fields.refuse(name, f"a divisor of the number of heads, {num_heads}")


def _limits(fields: DecoderFields, limit: object) -> tuple[float, float]:
    """Returns `time_step_limit`; files spell its infinity in several ways."""
    match limit:
        case None:
            return 0.0, math.inf
        case [int() | float() as least, int() | float() | {"__float__": "Infinity"} | "Infinity" as most]:
            return float(least), float(most) if isinstance(most, int | float) else math.inf
    raise fields.refuse("time_step_limit", "a list of two numbers")


class MambaFields(LlamaLikeFields):
    """The fields of Mamba-2 in Bamba's and Granite's spelling."""

    mamba_n_heads: Heads = 128
    mamba_n_groups: Heads = 1
    mamba_d_state: Size = 256
    mamba_d_head: Size | Literal["auto"] = "auto"
    mamba_d_conv: Count = 4
    mamba_expand: Count = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: object = None
    attention_bias: bool = False

    def inner_size(self) -> tuple[int, str]:
        """Returns the channels of all heads, and the spelling in the file."""
        return self.mamba_expand * self.hidden_size, "mamba_expand * hidden_size"

    def mamba(self) -> MambaSwitches:
        inner, name = self.inner_size()
        head_dim = inner // self.mamba_n_heads if self.mamba_d_head == "auto" else self.mamba_d_head
        if head_dim * self.mamba_n_heads != inner:
            raise self.refuse("mamba_d_head", f"{name}, {inner}, divided by mamba_n_heads")
        _check_groups(self, self.mamba_n_heads, self.mamba_n_groups, "mamba_n_groups")
        if self.mamba_d_conv < 2:
            raise self.refuse("mamba_d_conv", "an integer of at least 2")
        dt_min, dt_max = _limits(self, self.time_step_limit)
        return MambaSwitches(
            head_dim=head_dim,
            state_size=self.mamba_d_state,
            conv_width=self.mamba_d_conv,
            conv_bias=self.mamba_conv_bias,
            projection_bias=self.mamba_proj_bias,
            dt_min=dt_min,
            dt_max=dt_max,
        )

    def with_states(
        self, model: ModelConfig, switches: MambaSwitches, layers: tuple[bool, ...], *, name: str
    ) -> ModelConfig:
        """Returns the model with the states of its Mamba-2 layers.

        Args:
            layers: whether each layer is Mamba-2.
            name: name of the field that lists the layers.
        """
        if not any(layers):
            return model
        if all(layers):
            raise self.refuse(name, "at least one layer with attention")
        recurrent = switches.recurrent(layers, num_heads=self.mamba_n_heads, num_groups=self.mamba_n_groups)
        return replace(model, recurrent=recurrent)


class _BambaFields(MambaFields):
    partial_rotary: ClassVar[bool] = True
    partial_rotary_factor: Fraction = 0.5
    rms_norm_eps: Positive = 1e-5
    attn_layer_indices: Integers = ()


def read_bamba(file: ConfigFile) -> ModelConfig:
    fields = _BambaFields.read(file)
    switches, bias = fields.mamba(), fields.attention_bias
    attention = fields.gqa(qkv_bias=bias, output_bias=bias)
    model = fields.model(
        attention=attention,
        rope=fields.rope(dim=attention.head_dim),
        intermediate_size=fields.intermediate_size,
        switches=switches,
    )
    layers = tuple(index not in fields.attn_layer_indices for index in range(fields.num_hidden_layers))
    return fields.with_states(model, switches, layers, name="attn_layer_indices")


class _GraniteHybridFields(MambaFields, RoutedFields):
    layers_block_type: Texts = ()
    num_local_experts: CountOrZero | None = 8
    num_experts_per_tok: CountOrZero = 2
    shared_intermediate_size: Size = 1024
    position_embedding_type: Literal["rope", "nope"] | None = None
    embedding_multiplier: Positive = 1.0
    residual_multiplier: Positive = 1.0
    attention_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0

    def layers_with_states(self) -> tuple[bool, ...]:
        kinds = tuple(_KINDS.get(kind, kind) for kind in self.layer_types or self.layers_block_type)
        kinds = kinds or (_MAMBA,) * self.num_hidden_layers
        if len(kinds) != self.num_hidden_layers or not set(kinds) <= {_MAMBA, _ATTENTION}:
            raise self.refuse("layer_types", f"mamba or attention for each of {self.num_hidden_layers} layers")
        return tuple(kind == _MAMBA for kind in kinds)


def read_granite_hybrid(file: ConfigFile) -> ModelConfig:
    fields = _GraniteHybridFields.read(file)
    switches = replace(
        fields.mamba(),
        embedding_multiplier=fields.embedding_multiplier,
        residual_multiplier=fields.residual_multiplier,
        logits_multiplier=1 / fields.logits_scaling,
    )
    bias = fields.attention_bias
    attention = fields.gqa(qkv_bias=bias, output_bias=bias, scale=fields.attention_multiplier)
    moe = None
    if fields.num_local_experts:
        moe = fields.greedy_experts(
            fields.num_local_experts,
            per_token=fields.num_experts_per_tok,
            intermediate_size=fields.intermediate_size,
            normalize_weights=True,
            shared_intermediate_size=fields.shared_intermediate_size,
        )
    rotates = fields.position_embedding_type == "rope"
    model = fields.model(
        attention=attention,
        rope=fields.rope(dim=attention.head_dim) if rotates else None,
        intermediate_size=fields.shared_intermediate_size,
        moe=moe,
        switches=switches,
    )
    return fields.with_states(model, switches, fields.layers_with_states(), name="layer_types")


class _NemotronHFields(DecoderFields):
    """The fields of Nemotron-H. Older files spell some as Bamba does."""

    intermediate_size: Size = 21504
    layers_block_type: Texts = ()
    mlp_hidden_act: Literal["relu2"] = "relu2"
    mamba_hidden_act: Literal["silu", "swish"] = "silu"
    sliding_window: None = None
    layer_norm_epsilon: Positive = 1e-5
    mamba_num_heads: Heads = 128
    mamba_head_dim: Size = 64
    ssm_state_size: Size = 128
    n_groups: Heads = 8
    conv_kernel: Count = 4
    use_conv_bias: bool = True
    use_bias: bool = False
    time_step_min: AtLeastZero = 0.001
    head_dim: Size | None = 128
    n_routed_experts: Heads = 8
    num_experts_per_tok: Heads = 2
    moe_intermediate_size: Size = 7688
    moe_shared_expert_intermediate_size: Size = 7688
    moe_latent_size: Size | None = None
    routed_scaling_factor: Positive = 1.0
    n_group: Heads = 1
    topk_group: Heads = 1
    norm_topk_prob: bool = True
    num_nextn_predict_layers: CountOrZero = 0

    def kinds(self) -> tuple[str, ...]:
        kinds = tuple(_KINDS.get(kind, kind) for kind in self.layers_block_type)
        if not set(kinds) <= set(_LETTERS.values()):
            raise self.refuse("layers_block_type", *_LETTERS.values())
        if _ATTENTION not in kinds or _MAMBA not in kinds:
            raise self.refuse("layers_block_type", f"layers of both kinds: {_MAMBA} and {_ATTENTION}")
        return kinds

    def mamba(self) -> MambaSwitches:
        _check_groups(self, self.mamba_num_heads, self.n_groups, "n_groups")
        if self.conv_kernel < 2:
            raise self.refuse("conv_kernel", "an integer of at least 2")
        return MambaSwitches(
            head_dim=self.mamba_head_dim,
            state_size=self.ssm_state_size,
            conv_width=self.conv_kernel,
            conv_bias=self.use_conv_bias,
            projection_bias=self.use_bias,
            # NOTE: transformers uses the least step as the limit and ignores `time_step_limit`.
            dt_min=self.time_step_min,
            dt_max=math.inf,
            kinds=self.kinds(),
            latent_size=self.moe_latent_size or 0,
        )

    def experts(self, layers: tuple[bool, ...]) -> MoEConfig | None:
        if not any(layers):
            return None
        if self.num_experts_per_tok > self.n_routed_experts:
            raise self.refuse("num_experts_per_tok", f"at most n_routed_experts, {self.n_routed_experts}")
        if self.n_routed_experts % self.n_group or self.topk_group > self.n_group:
            raise self.refuse("n_group", "a divisor of n_routed_experts, and topk_group at most that")
        return MoEConfig(
            layers=layers,
            num_experts=self.n_routed_experts,
            experts_per_token=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            shared_intermediate_size=self.moe_shared_expert_intermediate_size,
            scoring=Scoring.SIGMOID,
            method=TopKMethod.NOAUX_TC,
            num_groups=self.n_group,
            groups_per_token=self.topk_group,
            normalize_weights=self.norm_topk_prob,
            weight_scale=self.routed_scaling_factor,
        )


def read_nemotron_h(file: ConfigFile) -> ModelConfig:
    fields = _NemotronHFields.read(_with_kinds(file))
    switches = fields.mamba()
    kinds = switches.kinds
    model = fields.model(
        attention=fields.gqa(qkv_bias=False, output_bias=False),
        rope=None,
        intermediate_size=fields.intermediate_size,
        norm_eps=fields.layer_norm_epsilon,
        moe=fields.experts(tuple(kind == "moe" for kind in kinds)),
        mtp_layers=fields.num_nextn_predict_layers,
        switches=switches,
    )
    recurrent = switches.recurrent(
        tuple(kind == _MAMBA for kind in kinds),
        num_heads=fields.mamba_num_heads,
        num_groups=fields.n_groups,
        has_kv=tuple(kind == _ATTENTION for kind in kinds),
    )
    return replace(model, recurrent=recurrent)


def _with_kinds(file: ConfigFile) -> ConfigFile:
    """Returns the file with `layers_block_type`, which older files write as letters, and the number of layers."""
    values = dict(file.values)
    kinds = values.get("layers_block_type") or values.pop("layer_types", None)
    pattern = values.get("hybrid_override_pattern")
    if kinds is None and isinstance(pattern, str):
        if not set(pattern) <= set(_LETTERS):
            raise file.refuse("hybrid_override_pattern", f"letters of {' '.join(_LETTERS)}")
        kinds = [_LETTERS[letter] for letter in pattern]
    if not isinstance(kinds, list):
        raise file.refuse("layers_block_type", "a list of strings")
    spelled = {"layers_block_type": kinds, "num_hidden_layers": len(kinds)}
    for ours, theirs in (("conv_kernel", "mamba_d_conv"), ("n_groups", "mamba_n_groups")):
        if values.get(theirs) is not None:
            spelled[ours] = values[theirs]
    if values.get("mamba_dt_min") is not None:
        spelled["time_step_min"] = values["mamba_dt_min"]
    return ConfigFile(file.where, {**values, **spelled})
