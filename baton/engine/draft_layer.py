"""Decides which layer drafts tokens on a node: that of an EAGLE-3 head, the checkpoint's own for multi-token prediction
(MTP), or none."""

import logging
from pkgutil import resolve_name

import torch

from attention.backend import AttentionBackend
from baton.core.errors import ConfigError
from baton.engine.optional_layer import log_left_out
from baton.engine.same_model import check_same_head
from baton.kvcache.spec import KV_CACHE_DTYPES
from baton.models.checkpoint.checkpoint import read_checkpoint
from baton.models.checkpoint.names import LANGUAGE_MODEL, renamed
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.config.mtp import LAYER, mtp_form, why_no_mtp, with_mtp
from baton.models.families.dense.eagle_config import read_head
from baton.models.families.table import family_of
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.parallel import TensorParallel
from baton.models.loading.draft_head import head_digest, load_head
from baton.settings.node_config import NodeSettings

_log = logging.getLogger(__name__)

# Values of `NodeSettings.speculation` with which no layer drafts.
_WITHOUT_LAYER = "off", "text"
# Half of DeepSeek-V3 on four H200s: 9.87 instead of 9.37 ms for each token of one request.
_SLOW_WITH_OWNERS = (
    "with attention data parallelism it is computed outside of CUDA graphs, which takes longer than it saves"
)


def with_draft_layer(config: ModelConfig, settings: NodeSettings, *, logs: bool = False) -> ModelConfig:
    """Returns the config with the layer that drafts tokens, if the node drafts tokens and has such a layer.

    Args:
        logs: whether to log why the checkpoint's layer is left out, if it is.

    Raises:
        ConfigError: the settings name a head that the node cannot use.
    """
    if settings.draft_head is not None:
        return _with_head(config, settings)
    if settings.speculation in _WITHOUT_LAYER or not config.mtp_layers or config.headless:
        return config
    problem = why_no_mtp(config)
    if not problem and settings.speculation == "auto" and settings.attention_data_parallel:
        problem = f"{_SLOW_WITH_OWNERS}; --speculation always uses it"
    if not problem and settings.load_format == "safetensors":
        problem = _why_not_stored(config, settings)
    if not problem:
        return with_mtp(config)
    if logs:
        log_left_out(problem)
    return config


def _why_not_stored(config: ModelConfig, settings: NodeSettings) -> str:
    """Returns which part of the layer the files lack; empty if there is something of each part."""
    stored = {renamed(name, LANGUAGE_MODEL) for name in read_checkpoint(settings.model)}
    lacking = [
        prefix
        for prefix in mtp_form(config).prefixes(config.num_layers).values()
        if not any(name.startswith(prefix) for name in stored)
    ]
    if mtp_form(config).prefixes(config.num_layers)[LAYER] in lacking:
        return "the files have no tensors of it, as those that transformers saves"
    return f"the files have no tensors {', '.join(f'{prefix}*' for prefix in lacking)}" if lacking else ""


def _with_head(config: ModelConfig, settings: NodeSettings) -> ModelConfig:
    directory = settings.draft_head
    assert directory is not None
    if settings.speculation in _WITHOUT_LAYER:
        raise ConfigError(
            f"draft_head is {directory}, and speculation is {settings.speculation}",
            field="draft_head",
            value=str(directory),
            allowed=("none",),
            cure="give --speculation auto too, or leave out --draft-head",
        )
    if problem := _why_no_head(config):
        raise ConfigError(
            f"draft_head is {directory}, and an EAGLE-3 head cannot draft for {config.architecture}: {problem}",
            field="draft_head",
            value=str(directory),
            allowed=("none",),
            cure="leave out --draft-head",
        )
    head = read_head(directory, config, has_weights=settings.load_format == "safetensors")
    return config.with_head(head)


def _why_no_head(config: ModelConfig) -> str:
    """Returns why no EAGLE-3 head can read the model's hidden states; empty if one can."""
    if not isinstance(config.attention, GQAConfig):
        return "it has latent attention, and a head has keys and values of heads"
    if config.recurrent is not None:
        return "it has recurrent layers"
    if config.headless:
        return "it has no language model head"
    if not resolve_name(family_of(config.architecture).model).shows_stream:
        return "its layers do not show the hidden states that a head reads"
    return ""


def draft_digest(config: ModelConfig, settings: NodeSettings, parallel: TensorParallel, device: torch.device) -> str:
    """Returns the digest of the node's EAGLE-3 head; empty without one. All ranks call it together.

    Raises:
        ConfigError: the ranks have different heads.
    """
    if config.eagle is None:
        return ""
    assert settings.draft_head is not None
    digest = head_digest(settings.draft_head, config.eagle, load_format=settings.load_format)
    check_same_head(parallel, settings.draft_head, digest, device)
    return digest


def load_draft_head(
    model: CausalLM,
    config: ModelConfig,
    settings: NodeSettings,
    *,
    backend: AttentionBackend,
    dtype: str,
    device: torch.device,
    parallel: TensorParallel,
) -> None:
    """Gives a loaded model the EAGLE-3 head of its config.

    Args:
        backend: for the head's attention.
    """
    head = config.eagle
    assert head is not None
    assert settings.draft_head is not None
    _log.info(
        "the EAGLE-3 head in %s drafts %d of %d tokens from the inputs of layers %s",
        settings.draft_head,
        head.draft_vocab_size,
        config.vocab_size,
        ", ".join(map(str, head.reads)),
    )
    load_head(
        settings.draft_head,
        model,
        config,
        backend=backend,
        dtype=dtype,
        device=device,
        kv_dtype=KV_CACHE_DTYPES[settings.kv_cache_dtype],
        load_format=settings.load_format,
        batch_invariant=settings.batch_invariant,
        parallel=parallel,
    )
