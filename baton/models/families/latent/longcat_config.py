"""Reads config.json of LongCat-Flash."""

from dataclasses import replace
from typing import Literal

from baton.models.config.decoder import RotaryFields
from baton.models.config.fields import CountOrZero, Heads, Positive, Size, Table
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import MLAConfig, ModelConfig, MoEConfig, Scoring, TopKMethod


class _LongcatFields(RotaryFields):
    """The fields of LongCat-Flash. `num_layers` counts layers of two attentions each; transformers counts attentions in
    `num_hidden_layers`. Here both are the number of layers."""

    quantization_config: Table | None = None
    rms_norm_eps: Positive = 1e-5
    rope_theta: Positive = 10_000_000.0
    attention_method: Literal["MLA"] = "MLA"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    ffn_hidden_size: Size = 12288
    q_lora_rank: Size = 1536
    kv_lora_rank: Size = 512
    qk_nope_head_dim: Size = 128
    qk_rope_head_dim: Size = 64
    qk_head_dim: Size | None = None  # the sum of the two
    v_head_dim: Size = 128
    # NOTE: the publisher's code multiplies if these are true, transformers always, so false has no right answer.
    mla_scale_q_lora: Literal[True] = True
    mla_scale_kv_lora: Literal[True] = True
    n_routed_experts: Heads = 512
    zero_expert_num: CountOrZero | None = 256
    zero_expert_type: Literal["identity"] = "identity"
    expert_ffn_hidden_size: Size = 2048
    moe_topk: Heads = 12
    routed_scaling_factor: Positive = 6.0
    # NOTE: some readers of such files add the bias to the scores' logits, others load it without using it.
    router_bias: Literal[False] = False
    # NOTE: transformers ignores this field.
    norm_topk_prob: Literal[False] = False

    def mla(self) -> MLAConfig:
        if self.qk_head_dim not in (None, self.qk_nope_head_dim + self.qk_rope_head_dim):
            raise self.refuse("qk_head_dim", "qk_nope_head_dim + qk_rope_head_dim")
        return MLAConfig(
            num_heads=self.num_attention_heads,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            query_multiplier=(self.hidden_size / self.q_lora_rank) ** 0.5,
            latent_multiplier=(self.hidden_size / self.kv_lora_rank) ** 0.5,
        )

    def experts(self) -> MoEConfig:
        zero_experts = self.zero_expert_num or 0
        if self.moe_topk > self.n_routed_experts + zero_experts:
            raise self.refuse("moe_topk", f"at most all experts, {self.n_routed_experts + zero_experts}")
        return MoEConfig(
            layers=(True,) * self.num_hidden_layers,
            num_experts=self.n_routed_experts,
            experts_per_token=self.moe_topk,
            intermediate_size=self.expert_ffn_hidden_size,
            shared_intermediate_size=0,
            scoring=Scoring.SOFTMAX,
            method=TopKMethod.NOAUX_TC,
            num_groups=1,
            groups_per_token=1,
            normalize_weights=False,
            weight_scale=self.routed_scaling_factor,
            zero_experts=zero_experts,
        )


def read_longcat(file: ConfigFile) -> ModelConfig:
    fields = _LongcatFields.read(_with_layers(file))
    attention = fields.mla()
    model = fields.model(
        attention=attention,
        rope=fields.rope(dim=attention.qk_rope_head_dim, interleaved=True),
        intermediate_size=fields.ffn_hidden_size,
        moe=fields.experts(),
    )
    return replace(model, shortcut_experts=True)


def _with_layers(file: ConfigFile) -> ConfigFile:
    """Returns the file with its number of layers in other families' spelling."""
    layers, attentions = file.raw("num_layers"), file.raw("num_hidden_layers")
    if not isinstance(layers, int) or isinstance(layers, bool):
        raise file.refuse("num_layers", "an integer")
    if attentions not in (None, layers, 2 * layers):
        raise file.refuse("num_hidden_layers", f"2 * num_layers, {2 * layers}")
    return file.with_values({"num_hidden_layers": layers})
