"""Decides whether a node loads its checkpoint's layer for multi-token prediction (MTP), which drafts tokens."""

import logging

from baton.models.checkpoint.checkpoint import read_checkpoint
from baton.models.config.model_config import ModelConfig
from baton.models.config.mtp import LAYER, mtp_form, why_no_mtp, with_mtp
from baton.settings.node_config import NodeSettings

_log = logging.getLogger(__name__)


def with_draft_layer(config: ModelConfig, settings: NodeSettings) -> ModelConfig:
    """Returns the config with its MTP layer, if the node guesses tokens and can use the layer."""
    if settings.speculation == "off" or not config.mtp_layers:
        return config
    problem = why_no_mtp(config)
    if not problem and settings.load_format == "safetensors":
        stored, prefix = read_checkpoint(settings.model), mtp_form(config).prefixes(config.num_layers)[LAYER]
        if not any(name.removeprefix("language_model.").startswith(prefix) for name in stored):
            problem = "the files have no tensors of it, as those that transformers saves"
    if not problem:
        return with_mtp(config)
    _log.warning("the checkpoint's layer for multi-token prediction is not used: %s", problem)
    return config
