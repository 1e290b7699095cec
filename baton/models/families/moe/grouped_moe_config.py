"""Reads config.json of families with Llama's layers and DeepSeek-V3's experts: dots.llm1, Solar Open, K-EXAONE."""

from dataclasses import replace
from typing import Literal

from baton.models.config.fields import Count, CountOrZero, Heads, LayersOrZero, Positive, Size, Texts
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import GQAConfig, ModelConfig, MoEConfig, Scoring, TopKMethod
from baton.models.families.dense.dense_config import ExaoneFields
from baton.models.families.latent.deepseek_config import GroupedExpertFields


class _SigmoidFields(GroupedExpertFields):
    rms_norm_eps: Positive = 1e-5
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    scoring_func: Literal["sigmoid", "noaux_tc"] = "sigmoid"  # dots.llm1 writes the method's name here too
    moe_layer_freq: Literal[1] = 1
    n_group: Heads = 1
    topk_group: Heads = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: Positive = 1.0
    num_nextn_predict_layers: LayersOrZero = 0

    def experts(self) -> MoEConfig | None:
        return self.moe(
            scoring=Scoring.SIGMOID,
            method=TopKMethod.NOAUX_TC,
            normalize_weights=self.norm_topk_prob,
            weight_scale=self.routed_scaling_factor,
        )

    def with_experts(self, attention: GQAConfig, moe: MoEConfig | None) -> ModelConfig:
        return self.model(
            attention=attention,
            rope=self.rope(dim=attention.head_dim),
            intermediate_size=self.intermediate_size,
            moe=moe,
            mtp_layers=self.num_nextn_predict_layers,
        )


class _Dots1Fields(_SigmoidFields):
    rms_norm_eps: Positive = 1e-6
    norm_topk_prob: bool = False
    attention_bias: bool = False
    use_sliding_window: bool | None = None
    sliding_window: Count | None = 4096
    max_window_layers: CountOrZero = 62

    def windows(self) -> tuple[int | None, ...]:
        """Returns each layer's window by `layer_types`; without it, layers from `max_window_layers` on slide."""
        types = self.types_of_layers("full_attention", "sliding_attention")
        if not types:
            kept = range(self.num_hidden_layers)
            windows = tuple(None if index < self.max_window_layers else self.sliding_window for index in kept)
        else:
            windows = self.windows_by_type(self.sliding_window, every=1)
        # NOTE: transformers ignores the field, so a value that removes windows has no right answer.
        if self.use_sliding_window is False and any(windows):
            raise self.refuse("use_sliding_window", "true", cure="other fields give some layers a window")
        return windows


def read_dots1(file: ConfigFile) -> ModelConfig:
    fields = _Dots1Fields.read(file)
    bias, windows = fields.attention_bias, fields.windows()
    attention = fields.gqa(windows=windows, qkv_bias=bias, output_bias=bias, qk_norm=True)
    return fields.with_experts(attention, fields.experts())


class _SolarOpenFields(_SigmoidFields):
    rope_theta: Positive = 1_000_000.0
    head_dim: Size | None = 128
    intermediate_size: Size = 1  # no layer has a dense MLP, though some files mention its size
    first_k_dense_replace: Literal[0] = 0
    n_routed_experts: Heads = 128
    n_shared_experts: LayersOrZero = 1
    num_experts_per_tok: Heads = 8
    moe_intermediate_size: Size = 1280
    attention_bias: bool = False
    use_qk_norm: Literal[False] = False


def read_solar_open(file: ConfigFile) -> ModelConfig:
    fields = _SolarOpenFields.read(file)
    windows = fields.uniform_windows(None)
    attention = fields.gqa(windows=windows, qkv_bias=fields.attention_bias, output_bias=False)
    return replace(fields.with_experts(attention, fields.experts()), intermediate_size=fields.moe_intermediate_size)


class _ExaoneMoEFields(_SigmoidFields, ExaoneFields):
    num_experts: Heads = 64
    num_shared_experts: LayersOrZero = 1
    num_experts_per_tok: Heads = 8
    moe_intermediate_size: Size = 1024
    routed_scaling_factor: Positive = 2.5
    first_k_dense_replace: LayersOrZero = 1
    mlp_layer_types: Texts = ()

    def layers_with_experts(self) -> tuple[bool, ...]:
        """Whether each layer has experts. `mlp_layer_types` takes precedence over `first_k_dense_replace`, as in
        transformers; the publisher's `is_moe_layer` must not contradict it."""
        first = self.first_k_dense_replace
        layers = tuple(index >= first for index in range(self.num_hidden_layers))
        if self.mlp_layer_types:
            layers = self.layers_by_type(self.mlp_layer_types)
        given = self._file.raw("is_moe_layer")
        if given is not None and given != list(layers):
            raise self.refuse("is_moe_layer", "the layers of mlp_layer_types or after first_k_dense_replace")
        return layers


def read_exaone_moe(file: ConfigFile) -> ModelConfig:
    fields = _ExaoneMoEFields.read(file)
    names = {"n_routed_experts": fields.num_experts, "n_shared_experts": fields.num_shared_experts}
    fields = fields.model_copy(update=names)
    layers, moe = fields.layers_with_experts(), fields.experts()
    assert moe is not None
    return fields.with_experts(fields.attention(), replace(moe, layers=layers) if any(layers) else None)
