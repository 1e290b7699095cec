"""Reads config.json of gpt-oss."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

from baton.models.config.decoder import RotaryFields
from baton.models.config.fields import Count, Heads, Positive, Size, Table
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import ModelConfig, MoEConfig, Scoring, TopKMethod
from baton.models.config.quantization.config import read_mxfp4


@dataclass(frozen=True)
class GptOssSwitches:
    """The experts' activation: gate * sigmoid(`swiglu_alpha` * gate) * (up + 1), with gate and up clamped to
    `swiglu_limit`."""

    swiglu_limit: float
    swiglu_alpha: float


_ROPE = MappingProxyType(
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
)


class _GptOssFields(RotaryFields):
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType(
        {
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "sliding_window": 128,
            "attention_bias": True,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702,
        }
    )
    intermediate_size: Size
    quantization_config: Table | None = None
    attention_bias: bool = False
    sliding_window: Count | None
    num_local_experts: Heads
    num_experts_per_tok: Heads
    swiglu_limit: Positive
    swiglu_alpha: Positive

    def moe(self) -> MoEConfig:
        num_experts, per_token = self.num_local_experts, self.num_experts_per_tok
        if per_token > num_experts:
            raise self.refuse("num_experts_per_tok", f"at most num_local_experts, {num_experts}")
        return MoEConfig(
            layers=(True,) * self.num_hidden_layers,
            num_experts=num_experts,
            experts_per_token=per_token,
            intermediate_size=self.intermediate_size,
            shared_intermediate_size=0,
            # A softmax over the chosen experts is the softmax over all, normalized over the chosen ones.
            scoring=Scoring.SOFTMAX,
            method=TopKMethod.GREEDY,
            num_groups=1,
            groups_per_token=1,
            normalize_weights=True,
            weight_scale=1.0,
            router_bias=True,
        )


def read_gpt_oss(file: ConfigFile) -> ModelConfig:
    quantization = read_mxfp4(file)
    file = file.with_values({"quantization_config": None})
    if file.raw("rope_scaling") is None and "rope_parameters" not in file.values:
        file = file.with_values({"rope_parameters": dict(_ROPE)})
    fields = _GptOssFields.read(file)
    bias, windows = fields.attention_bias, fields.windows_by_type(fields.sliding_window, every=2)
    attention = fields.gqa(windows=windows, qkv_bias=bias, output_bias=bias, sinks=True)
    model = fields.model(
        attention=attention,
        rope=fields.rope(dim=attention.head_dim),
        intermediate_size=fields.intermediate_size,
        moe=fields.moe(),
        switches=GptOssSwitches(swiglu_limit=fields.swiglu_limit, swiglu_alpha=fields.swiglu_alpha),
    )
    return replace(model, quantization=quantization)
