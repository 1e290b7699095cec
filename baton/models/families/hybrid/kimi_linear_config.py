"""Reads config.json of Kimi-Linear, with Kimi delta attention in most layers and latent attention without positions in
others."""

from dataclasses import replace
from typing import Literal

from baton.models.config.fields import Count, Fields, Heads, Integers, Positive, Size, Table, Texts
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import MLAConfig, ModelConfig, MoEConfig, Scoring, TopKMethod
from baton.models.families.hybrid.delta_config import DeltaSwitches
from baton.models.families.latent.deepseek_config import GroupedExpertFields

# Maps the family's names to DeepSeek's names of the same fields.
_COMMON_NAMES = {
    "model_max_length": "max_position_embeddings",
    "num_local_experts": "n_routed_experts",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
}


class _LinearAttention(Fields):
    """The table `linear_attn_config` of published files. Layers are counted from 1."""

    full_attn_layers: Integers
    kda_layers: Integers
    head_dim: Size
    num_heads: Heads
    short_conv_kernel_size: Count


class _KimiLinearFields(GroupedExpertFields):
    rms_norm_eps: Positive = 1e-5
    q_lora_rank: Size | None = None
    kv_lora_rank: Size = 512
    qk_nope_head_dim: Size = 128
    qk_rope_head_dim: Size = 64
    v_head_dim: Size = 128
    mla_use_nope: Literal[True] = True
    attention_bias: Literal[False] = False
    moe_router_activation_func: Literal["sigmoid"] = "sigmoid"
    use_grouped_topk: Literal[True] = True
    moe_layer_freq: Literal[1] = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: Positive = 2.446
    first_k_dense_replace: Count = 1
    mlp_layer_types: Texts = ()
    num_nextn_predict_layers: Literal[0] = 0
    linear_attn_config: Table | None = None
    linear_head_dim: Size = 128
    linear_num_heads: Heads = 32
    linear_conv_kernel_dim: Count = 4

    def linear_attention(self) -> tuple[tuple[bool, ...], int, int, int]:
        """Returns whether each layer has a delta rule, the number of heads, their channels and the convolution's
        width."""
        table = self.table("linear_attn_config")
        if not table.values:
            types = self.types_of_layers("full_attention", "linear_attention")
            if not types:
                raise self.refuse("linear_attn_config", "an object")
            keeps = tuple(kind == "linear_attention" for kind in types)
            return keeps, self.linear_num_heads, self.linear_head_dim, self.linear_conv_kernel_dim
        fields = _LinearAttention.read(table)
        layers = range(1, self.num_hidden_layers + 1)
        if sorted((*fields.full_attn_layers, *fields.kda_layers)) != list(layers):
            raise fields.refuse("kda_layers", f"the layers from 1 to {layers[-1]} that are not in full_attn_layers")
        keeps = tuple(layer in fields.kda_layers for layer in layers)
        return keeps, fields.num_heads, fields.head_dim, fields.short_conv_kernel_size

    def experts(self) -> MoEConfig | None:
        moe = self.moe(
            scoring=Scoring.SIGMOID,
            method=TopKMethod.NOAUX_TC,
            normalize_weights=self.norm_topk_prob,
            weight_scale=self.routed_scaling_factor,
        )
        types, num_layers = self.mlp_layer_types, self.num_hidden_layers
        if moe is None or not types:
            return moe
        if len(types) != num_layers or not set(types) <= {"dense", "sparse"}:
            raise self.refuse("mlp_layer_types", f"dense or sparse for each of {num_layers} layers")
        layers = tuple(kind == "sparse" for kind in types)
        return replace(moe, layers=layers) if any(layers) else None


def read_kimi_linear(file: ConfigFile) -> ModelConfig:
    given = {common: file.raw(name) for name, common in _COMMON_NAMES.items() if file.raw(name) is not None}
    fields = _KimiLinearFields.read(file.with_values(given))
    keeps, num_heads, head_dim, width = fields.linear_attention()
    if all(keeps) or not any(keeps):
        raise fields.refuse("linear_attn_config", "layers of both kinds")
    if width < 2:
        raise fields.refuse("linear_attn_config", "a short_conv_kernel_size of at least 2")
    switches = DeltaSwitches(key_dim=head_dim, value_dim=head_dim, values_per_key=1, conv_width=width)
    model = fields.model(
        attention=MLAConfig(
            num_heads=fields.num_attention_heads,
            q_lora_rank=fields.q_lora_rank,
            kv_lora_rank=fields.kv_lora_rank,
            qk_nope_head_dim=fields.qk_nope_head_dim,
            qk_rope_head_dim=fields.qk_rope_head_dim,
            v_head_dim=fields.v_head_dim,
        ),
        rope=None,
        intermediate_size=fields.intermediate_size,
        moe=fields.experts(),
        switches=switches,
    )
    return replace(model, recurrent=switches.recurrent(keeps, num_heads=num_heads))
