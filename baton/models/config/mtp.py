"""Decides whether a model drafts tokens with a layer for multi-token prediction (MTP) of its checkpoint, and describes
that layer as a model of one layer. Pure values; no torch.

DeepSeek-V3 stores such layers after its last one (arXiv 2412.19437, section 2.2), and GLM-4.5 uses the same names.
"""

from dataclasses import replace

from baton.models.config.model_config import GQAConfig, MLAConfig, ModelConfig

# Architectures whose checkpoints store the layer under `model.layers.<number of layers>`, in DeepSeek-V3's names.
_ARCHITECTURES = frozenset(
    {"DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "KimiK25ForConditionalGeneration"}
)


def with_mtp(config: ModelConfig) -> ModelConfig:
    """Returns the config of the same model with its first MTP layer, or `config` itself if `why_no_mtp` gives a
    reason."""
    return config if why_no_mtp(config) else replace(config, drafts=True)


def why_no_mtp(config: ModelConfig) -> str:
    """Returns why the model cannot draft with an MTP layer; empty if it can."""
    attention = config.attention
    if not config.mtp_layers:
        return "its checkpoint has no layers for multi-token prediction"
    if config.architecture not in _ARCHITECTURES:
        return f"the MTP layers of {config.architecture} are not supported"
    if isinstance(attention, MLAConfig) and attention.index is not None:
        return "MTP layers with sparse attention are not supported"
    if isinstance(attention, GQAConfig) and any(attention.sliding_windows):
        return "MTP layers with sliding windows are not supported"
    return ""


def mtp_config(config: ModelConfig) -> ModelConfig:
    """Returns the model of one layer that the MTP layer is, without its own norms and projection. It comes after the
    model's last layer, so it has experts if any layer has."""
    attention, moe = config.attention, config.moe
    if isinstance(attention, GQAConfig):
        attention = replace(attention, sliding_windows=attention.sliding_windows[-1:])
    return replace(
        config,
        num_layers=1,
        mtp_layers=0,
        drafts=False,
        attention=attention,
        moe=None if moe is None else replace(moe, layers=(True,)),
    )
