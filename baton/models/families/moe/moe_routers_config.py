"""Reads config.json of mixtures of experts whose routers have corrections, sigmoids or a sparse mixer: GLM-4.5,
ERNIE-4.5, MiniMax-M2, Phi-3.5-MoE."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from baton.models.config.fields import Count, Fraction, Heads, Integers, LayersOrZero, Positive, Size
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import ModelConfig, QKNorm, Scoring, TopKMethod
from baton.models.families.latent.deepseek_config import GroupedExpertFields
from baton.models.families.moe.moe_config import RoutedFields


class _Glm4MoEFields(GroupedExpertFields):
    rms_norm_eps: Positive = 1e-5
    partial_rotary: ClassVar[bool] = True
    partial_rotary_factor: Fraction = 0.5
    attention_bias: bool = False
    use_qk_norm: bool = False
    n_group: Heads = 1
    topk_group: Heads = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: Positive = 1.0
    num_nextn_predict_layers: LayersOrZero = 0


def read_glm4_moe(file: ConfigFile) -> ModelConfig:
    fields = _Glm4MoEFields.read(file)
    windows = fields.uniform_windows(None)
    attention = fields.gqa(
        windows=windows, qkv_bias=fields.attention_bias, output_bias=False, qk_norm=fields.use_qk_norm
    )
    return fields.model(
        attention=attention,
        rope=fields.rope(dim=attention.head_dim),
        intermediate_size=fields.intermediate_size,
        moe=fields.moe(
            scoring=Scoring.SIGMOID,
            method=TopKMethod.NOAUX_TC,
            normalize_weights=fields.norm_topk_prob,
            weight_scale=fields.routed_scaling_factor,
        ),
        mtp_layers=fields.num_nextn_predict_layers,
    )


class _ErnieMoEFields(RoutedFields):
    per_token_field: ClassVar[str] = "moe_k"
    rope_theta: Positive = 500_000.0
    tie_word_embeddings: bool = True
    rms_norm_eps: Positive = 1e-5
    use_bias: Literal[False] = False
    moe_intermediate_size: Size = 1536
    moe_k: Heads = 6
    moe_num_experts: Heads = 64
    moe_num_shared_experts: LayersOrZero = 2
    moe_layer_start_index: LayersOrZero = 1
    moe_layer_end_index: Annotated[int, Ge(-1)] = -1
    moe_layer_interval: Count = 1
    moe_norm_min: Positive = 1e-12
    moe_use_aux_free: Literal[True] = True  # the learnt correction
    moe_gate_act: Literal["softmax"] = "softmax"
    num_nextn_predict_layers: LayersOrZero = 0

    def layers_with_experts(self) -> tuple[bool, ...]:
        last = self.num_hidden_layers - 1 if self.moe_layer_end_index == -1 else self.moe_layer_end_index
        return tuple(
            (index + 1) % self.moe_layer_interval == 0 and self.moe_layer_start_index <= index <= last
            for index in range(self.num_hidden_layers)
        )


def read_ernie_moe(file: ConfigFile) -> ModelConfig:
    fields = _ErnieMoEFields.read(file)
    # The smallest divisor of chosen scores. No sum is near it, so it is not applied.
    if fields.moe_norm_min > 1e-9:
        raise fields.refuse("moe_norm_min", "a number of at most 1e-9")
    attention = fields.gqa(windows=fields.uniform_windows(None), qkv_bias=False, output_bias=False)
    moe = fields.greedy_experts(
        fields.moe_num_experts,
        per_token=fields.moe_k,
        intermediate_size=fields.moe_intermediate_size,
        normalize_weights=True,
        layers=fields.layers_with_experts(),
        shared_intermediate_size=fields.moe_intermediate_size * fields.moe_num_shared_experts,
    )
    return fields.model(
        attention=attention,
        rope=fields.rope(dim=attention.head_dim, interleaved=True),
        intermediate_size=fields.intermediate_size,
        moe=None if moe is None else replace(moe, method=TopKMethod.NOAUX_TC),
        mtp_layers=fields.num_nextn_predict_layers,
    )


class _MiniMaxM2Fields(RoutedFields):
    partial_rotary: ClassVar[bool] = True
    rope_theta: Positive = 5_000_000.0
    head_dim: Size = 128
    rotary_dim: Size | None = None  # the older spelling of partial_rotary_factor, in channels
    num_experts_per_tok: Heads = 8
    scoring_func: Literal["sigmoid"] = "sigmoid"
    use_routing_bias: Literal[True] = True
    use_qk_norm: Literal[True] = True
    qk_norm_type: Literal["per_layer"] = "per_layer"
    shared_intermediate_size: Literal[0] = 0
    attn_type_list: Integers = ()
    num_mtp_modules: LayersOrZero = 0


def read_minimax_m2(file: ConfigFile) -> ModelConfig:
    fields = _MiniMaxM2Fields.read(file)
    if not set(fields.attn_type_list) <= {1}:
        raise fields.refuse("attn_type_list", "1 for each layer")
    if fields.rotary_dim is not None:
        values = {"partial_rotary_factor": fields.rotary_dim / fields.head_dim}
        fields = _MiniMaxM2Fields.read(file.with_values(values))
    windows = fields.uniform_windows(None)
    attention = fields.gqa(windows=windows, qkv_bias=False, output_bias=False, qk_norm=True, qk_norm_of=QKNorm.ROW)
    moe = fields.greedy_experts(
        fields.count_of_experts(),
        per_token=fields.num_experts_per_tok,
        intermediate_size=fields.intermediate_size,
        normalize_weights=True,
    )
    assert moe is not None
    return fields.model(
        attention=attention,
        rope=fields.rope(dim=attention.head_dim),
        intermediate_size=fields.intermediate_size,
        moe=replace(moe, scoring=Scoring.SIGMOID, method=TopKMethod.NOAUX_TC),
        mtp_layers=fields.num_mtp_modules,
    )


@dataclass(frozen=True)
class PhimoeSwitches:
    """Whether logits have a bias."""

    head_bias: bool


class _PhimoeFields(RoutedFields):
    rms_norm_eps: Positive = 1e-5  # of layer norms
    rope_theta: Positive = 1_000_000.0
    num_experts_per_tok: Literal[2] = 2
    router_jitter_noise: Annotated[float, Ge(0)] = 0.01
    sliding_window: Count | None = None
    attention_bias: bool = False
    lm_head_bias: bool = False


def read_phimoe(file: ConfigFile) -> ModelConfig:
    fields = _PhimoeFields.read(file)
    window = fields.sliding_window
    sees_all = window is None or window >= fields.max_position_embeddings
    bias, windows = fields.attention_bias, fields.uniform_windows(None if sees_all else window)
    moe = fields.greedy_experts(
        fields.count_of_experts(),
        per_token=fields.num_experts_per_tok,
        intermediate_size=fields.intermediate_size,
        normalize_weights=False,
    )
    assert moe is not None
    attention = fields.gqa(windows=windows, qkv_bias=bias, output_bias=bias)
    return fields.model(
        attention=attention,
        rope=fields.rope(dim=attention.head_dim),
        intermediate_size=fields.intermediate_size,
        moe=replace(moe, method=TopKMethod.SPARSE_MIXER, mixer_threshold=2 * fields.router_jitter_noise),
        switches=PhimoeSwitches(head_bias=fields.lm_head_bias),
    )
