"""Reads config.json of DeepSeek V2 and V3, and of GLM-4.7-Flash."""

from dataclasses import replace
from typing import Literal

from baton.models.config.decoder import RotaryFields
from baton.models.config.fields import Heads, LayersOrZero, Positive, Size, Table, Texts
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import MLAConfig, ModelConfig, MoEConfig, Scoring, TopKMethod


class GroupedExpertFields(RotaryFields):
    """The fields of DeepSeek's and GLM-4.5's experts, which follow dense layers and may be in groups."""

    intermediate_size: Size
    quantization_config: Table | None = None
    n_routed_experts: Heads | None = None  # null: all layers are dense
    num_experts_per_tok: Heads | None = None
    moe_intermediate_size: Size | None = None
    n_shared_experts: LayersOrZero = 0
    first_k_dense_replace: LayersOrZero = 0
    n_group: Heads | None = None
    topk_group: Heads | None = None

    def moe(
        self, *, scoring: Scoring, method: TopKMethod, normalize_weights: bool, weight_scale: float
    ) -> MoEConfig | None:
        """Returns the mixture of experts; None for a model whose layers are all dense."""
        if self.n_routed_experts is None:
            return None
        num_experts, first = self.n_routed_experts, self.first_k_dense_replace
        grouped = method is not TopKMethod.GREEDY
        num_groups = self._needed("n_group", self.n_group) if grouped else 1
        groups_per_token = self._needed("topk_group", self.topk_group) if grouped else 1
        per_token = self._needed("num_experts_per_tok", self.num_experts_per_tok)
        smallest_group = 2 if method is TopKMethod.NOAUX_TC else 1
        if num_experts % num_groups or num_experts // num_groups < smallest_group:
            raise self.refuse("n_group", f"a divisor of n_routed_experts, {num_experts}, into {smallest_group} or more")
        if groups_per_token > num_groups:
            raise self.refuse("topk_group", f"1 to n_group, {num_groups}")
        if per_token > groups_per_token * (num_experts // num_groups):
            raise self.refuse("num_experts_per_tok", "at most the experts of topk_group groups")
        intermediate_size = self._needed("moe_intermediate_size", self.moe_intermediate_size)
        return MoEConfig(
            layers=tuple(index >= first for index in range(self.num_hidden_layers)),
            num_experts=num_experts,
            experts_per_token=per_token,
            intermediate_size=intermediate_size,
            shared_intermediate_size=intermediate_size * self.n_shared_experts,
            scoring=scoring,
            method=method,
            num_groups=num_groups,
            groups_per_token=groups_per_token,
            normalize_weights=normalize_weights,
            weight_scale=weight_scale,
        )

    def layers_by_type(self, types: tuple[str, ...]) -> tuple[bool, ...]:
        """Whether each layer has experts, by the field `mlp_layer_types`."""
        if len(types) != self.num_hidden_layers or not set(types) <= {"dense", "sparse"}:
            raise self.refuse("mlp_layer_types", f"dense or sparse for each of {self.num_hidden_layers} layers")
        return tuple(kind == "sparse" for kind in types)

    def _needed(self, name: str, value: int | None) -> int:
        if value is None:
            raise self.refuse(name, "an integer of at least 1")
        return value


class DeepseekFields(GroupedExpertFields):
    attention_bias: Literal[False] = False
    q_lora_rank: Size | None = None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    # NOTE: the publisher's code has dense layers between, transformers ignores the field: no right answer exists.
    moe_layer_freq: Literal[1] = 1

    def mla(self) -> MLAConfig:
        return MLAConfig(
            num_heads=self.num_attention_heads,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
        )


class _DeepseekV2Fields(DeepseekFields):
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    scoring_func: Literal["softmax"] = "softmax"
    # NOTE: the publisher's code normalizes instead of scaling, transformers ignores the field: no right answer exists.
    norm_topk_prob: Literal[False] = False
    routed_scaling_factor: Positive = 1.0


def read_deepseek_v2(file: ConfigFile) -> ModelConfig:
    fields = _DeepseekV2Fields.read(file)
    attention = fields.mla()
    return fields.model(
        attention=attention,
        rope=fields.rope(dim=attention.qk_rope_head_dim, interleaved=True),
        intermediate_size=fields.intermediate_size,
        moe=fields.moe(
            scoring=Scoring.SOFTMAX,
            method=TopKMethod(fields.topk_method),
            normalize_weights=False,
            weight_scale=fields.routed_scaling_factor,
        ),
    )


class DeepseekV3Fields(DeepseekFields):
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    scoring_func: Literal["sigmoid"] = "sigmoid"
    norm_topk_prob: bool = True
    routed_scaling_factor: Positive = 2.5
    rope_interleave: bool = True
    num_nextn_predict_layers: LayersOrZero = 0


def read_deepseek_v3(file: ConfigFile) -> ModelConfig:
    return _deepseek_v3(DeepseekV3Fields.read(file))


def _deepseek_v3(fields: DeepseekV3Fields) -> ModelConfig:
    attention = fields.mla()
    return fields.model(
        attention=attention,
        rope=fields.rope(dim=attention.qk_rope_head_dim, interleaved=fields.rope_interleave),
        intermediate_size=fields.intermediate_size,
        moe=fields.moe(
            scoring=Scoring.SIGMOID,
            method=TopKMethod.NOAUX_TC,
            normalize_weights=fields.norm_topk_prob,
            weight_scale=fields.routed_scaling_factor,
        ),
        mtp_layers=fields.num_nextn_predict_layers,
    )


class _Glm4MoELiteFields(DeepseekV3Fields):
    rms_norm_eps: Positive = 1e-5
    n_routed_experts: Heads = 64
    num_experts_per_tok: Heads = 4
    moe_intermediate_size: Size = 1536
    n_shared_experts: LayersOrZero = 1
    n_group: Heads = 1
    topk_group: Heads = 1
    routed_scaling_factor: Positive = 1.8
    first_k_dense_replace: LayersOrZero = 1
    mlp_layer_types: Texts = ()

    def layers_with_experts(self) -> tuple[bool, ...]:
        """Whether each layer has experts: all but the first, unless the file lists them. transformers does not read
        `first_k_dense_replace`."""
        types = self.mlp_layer_types or ("dense",) + ("sparse",) * (self.num_hidden_layers - 1)
        layers = self.layers_by_type(types)
        first = self.first_k_dense_replace
        if "first_k_dense_replace" in self.model_fields_set and (any(layers[:first]) or not all(layers[first:])):
            raise self.refuse("first_k_dense_replace", "the number of dense layers before all others")
        return layers


def read_glm4_moe_lite(file: ConfigFile) -> ModelConfig:
    """Reads GLM-4.7-Flash, which has DeepSeek-V3's latent attention and experts."""
    fields = _Glm4MoELiteFields.read(file)
    config = _deepseek_v3(fields)
    assert config.moe is not None
    layers = fields.layers_with_experts()
    return replace(config, moe=replace(config.moe, layers=layers) if any(layers) else None)
