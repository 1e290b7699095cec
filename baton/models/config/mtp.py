"""Decides whether a model drafts tokens with a layer for multi-token prediction (MTP) of its checkpoint, and describes
that layer as a model of one layer, with its names in checkpoints. Pure values; no torch.

DeepSeek-V3 stores such layers after its last one (arXiv 2412.19437, section 2.2), and GLM-4.5 uses the same names.
Qwen3-Next, Qwen3.5 and MiMo have their own names for the same parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from baton.models.config.model_config import GQAConfig, ModelConfig

# Our path of the decoder layer within the MTP layer, as a prefix.
LAYER = "mtp.layer."


@dataclass(frozen=True)
class MTPForm:
    """How checkpoints of some architectures store their first MTP layer.

    Attributes:
        layer: their prefix of the decoder layer within. `*` stands for the number of the model's layers.
        embedding_norm, hidden_norm: their names of the norms of the next token's embedding and of the hidden state.
        projection: their name of the projection of both, side by side, to one hidden state.
        last_norm: their name of the norm before the head.
        hidden_first: the projection reads the hidden state before the embedding.
        before_last_norm: the layer reads the model's hidden state before its last norm, not after it.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    last_norm: str
    hidden_first: bool = False
    before_last_norm: bool = False

    def prefixes(self, num_layers: int) -> dict[str, str]:
        """Returns prefixes of our module paths, with those of checkpoints. The first match counts."""
        ours = {
            LAYER: self.layer,
            "mtp.enorm.": f"{self.embedding_norm}.",
            "mtp.hnorm.": f"{self.hidden_norm}.",
            "mtp.eh_proj.": f"{self.projection}.",
            "mtp.shared_head.norm.": f"{self.last_norm}.",
        }
        return {path: theirs.replace("*", str(num_layers)) for path, theirs in ours.items()}


_AFTER_LAST = "model.layers.*."
_DEEPSEEK = MTPForm(
    layer=_AFTER_LAST,
    embedding_norm=f"{_AFTER_LAST}enorm",
    hidden_norm=f"{_AFTER_LAST}hnorm",
    projection=f"{_AFTER_LAST}eh_proj",
    last_norm=f"{_AFTER_LAST}shared_head.norm",
)
_QWEN = MTPForm(
    layer="mtp.layers.0.",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    last_norm="mtp.norm",
)
_FIRST_OF_MIMO = "model.mtp_layers.0."
_MIMO = MTPForm(
    layer=_FIRST_OF_MIMO,
    embedding_norm=f"{_FIRST_OF_MIMO}token_layernorm",
    hidden_norm=f"{_FIRST_OF_MIMO}hidden_layernorm",
    projection=f"{_FIRST_OF_MIMO}input_proj",
    last_norm=f"{_FIRST_OF_MIMO}final_layernorm",
    hidden_first=True,
    before_last_norm=True,
)
_FORMS: Mapping[str, MTPForm] = MappingProxyType(
    {
        "DeepseekV3ForCausalLM": _DEEPSEEK,
        "DeepseekV32ForCausalLM": _DEEPSEEK,
        "GlmMoeDsaForCausalLM": _DEEPSEEK,
        "Glm4MoeForCausalLM": _DEEPSEEK,
        "Glm4MoeLiteForCausalLM": _DEEPSEEK,
        "KimiK25ForConditionalGeneration": _DEEPSEEK,
        "MiMoForCausalLM": _MIMO,
        "Qwen3NextForCausalLM": _QWEN,
        "Qwen3_5ForCausalLM": _QWEN,
        "Qwen3_5ForConditionalGeneration": _QWEN,
        "Qwen3_5MoeForCausalLM": _QWEN,
        "Qwen3_5MoeForConditionalGeneration": _QWEN,
    }
)


def mtp_form(config: ModelConfig) -> MTPForm:
    """Returns how the checkpoint stores the MTP layer of a model for which `why_no_mtp` gives no reason."""
    return _FORMS[config.architecture]


def with_mtp(config: ModelConfig) -> ModelConfig:
    """Returns the config of the same model with its first MTP layer, or `config` itself if `why_no_mtp` gives a
    reason."""
    return config if why_no_mtp(config) else replace(config, drafts=True)


def why_no_mtp(config: ModelConfig) -> str:
    """Returns why the model cannot draft with an MTP layer; empty if it can."""
    attention = config.attention
    if not config.mtp_layers:
        return "its checkpoint has no layers for multi-token prediction"
    if config.headless:
        return "it generates nothing"
    if config.architecture not in _FORMS:
        return f"the MTP layers of {config.architecture} are not supported, only those of {', '.join(_FORMS)}"
    if isinstance(attention, GQAConfig) and any(attention.sliding_windows):
        return "MTP layers with sliding windows are not supported"
    return ""


def mtp_config(config: ModelConfig) -> ModelConfig:
    """Returns the model of one layer that the MTP layer is, without its own norms and projection. It comes after the
    model's last layer, so it has experts if any layer has. Its attention sees all tokens, also in models whose other
    layers keep recurrent states. With sparse attention it has an indexer of its own, also where layers of the model
    share their selection."""
    attention, moe = config.attention, config.moe
    if isinstance(attention, GQAConfig):
        attention = replace(attention, sliding_windows=attention.sliding_windows[-1:])
    elif attention.index is not None:
        attention = replace(attention, index=replace(attention.index, layers=(True,)))
    return replace(
        config,
        num_layers=1,
        mtp_layers=0,
        drafts=False,
        attention=attention,
        recurrent=None,
        moe=None if moe is None else replace(moe, layers=(True,)),
    )
