"""Reads config.json of Falcon-H1."""

from dataclasses import asdict, dataclass, replace
from typing import Literal

from baton.models.config.fields import Heads, Numbers, Positive, Size
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import ModelConfig
from baton.models.families.hybrid.mamba_config import MambaFields, MambaSwitches


@dataclass(frozen=True)
class FalconH1Switches(MambaSwitches):
    """The multipliers of a Falcon-H1.

    Attributes:
        mixer_multiplier: of the results of Mamba-2.
        attention_multipliers: of attention's input and result.
        mlp_multipliers: of gates before their activation, and of the MLP's result.
    """

    mixer_multiplier: float = 1.0
    attention_multipliers: tuple[float, float] = (1.0, 1.0)
    mlp_multipliers: tuple[float, float] = (1.0, 1.0)


class _FalconH1Fields(MambaFields):
    rms_norm_eps: Positive = 1e-5
    num_key_value_heads: Heads | None = 8
    mamba_d_ssm: Size | None = 1024
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    mamba_use_mlp: Literal[True] = True
    projectors_bias: bool = False
    attn_layer_indices: None = None  # every layer has attention
    embedding_multiplier: Positive = 1.0
    lm_head_multiplier: Positive = 1.0
    key_multiplier: Positive = 1.0
    attention_in_multiplier: Positive = 1.0
    attention_out_multiplier: Positive = 1.0
    ssm_in_multiplier: Positive = 1.0
    ssm_out_multiplier: Positive = 1.0
    ssm_multipliers: Numbers = (1.0,) * 5
    mlp_multipliers: Numbers = (1.0, 1.0)

    def inner_size(self) -> tuple[int, str]:
        return super().inner_size() if self.mamba_d_ssm is None else (self.mamba_d_ssm, "mamba_d_ssm")

    def switches(self) -> FalconH1Switches:
        if self.projectors_bias != self.mamba_proj_bias:
            raise self.refuse("projectors_bias", f"mamba_proj_bias, {str(self.mamba_proj_bias).lower()}")
        if self.mamba_rms_norm and self.mamba_norm_before_gate:
            raise self.refuse("mamba_norm_before_gate", "false", cure="norms are supported after their gate")
        if len(self.ssm_multipliers) != 5:
            raise self.refuse("ssm_multipliers", "five numbers above 0: of gate, inputs, B, C and steps")
        if len(self.mlp_multipliers) != 2:
            raise self.refuse("mlp_multipliers", "two numbers above 0: of gates and of the result")
        gates, result = self.mlp_multipliers
        mamba = replace(
            self.mamba(),
            gated_norm=self.mamba_rms_norm,
            embedding_multiplier=self.embedding_multiplier,
            logits_multiplier=self.lm_head_multiplier,
            input_multiplier=self.ssm_in_multiplier,
            part_multipliers=self.ssm_multipliers,
        )
        return FalconH1Switches(
            **asdict(mamba),
            mixer_multiplier=self.ssm_out_multiplier,
            attention_multipliers=(self.attention_in_multiplier, self.attention_out_multiplier),
            mlp_multipliers=(gates, result),
        )


def read_falcon_h1(file: ConfigFile) -> ModelConfig:
    fields = _FalconH1Fields.read(file)
    switches, bias = fields.switches(), fields.attention_bias
    if not set(fields.layer_types) <= {"hybrid"}:
        raise fields.refuse("layer_types", "hybrid for every layer of this architecture")
    attention = fields.gqa(qkv_bias=bias, output_bias=bias)
    # Scores are products of queries and keys, so their factor can include the keys'.
    attention = replace(attention, scale=attention.scale * fields.key_multiplier)
    model = fields.model(
        attention=attention,
        rope=fields.rope(dim=attention.head_dim),
        intermediate_size=fields.intermediate_size,
        switches=switches,
    )
    both = (True,) * model.num_layers
    recurrent = switches.recurrent(both, num_heads=fields.mamba_n_heads, num_groups=fields.mamba_n_groups, has_kv=both)
    return replace(model, recurrent=recurrent)
