"""Ranks compute parts of one model, and those of several hosts read copies of it: that these are equal is checked here.

All ranks call each check together. It raises the same error on all of them.
"""

import hashlib
from pathlib import Path

import torch

from baton.errors import ConfigError
from models.config.model_config import ModelConfig
from models.identity import ModelIdentity, config_digest
from models.parallel import TensorParallel


def check_same_config(parallel: TensorParallel, model: Path, config: ModelConfig, device: torch.device) -> None:
    """Comes before all else that ranks do together: with different configurations they would wait for each other in
    different places.

    Raises:
        ConfigError: the ranks have different models.
    """
    _check(parallel, model, "configurations", config_digest(config), device)


def check_same_files(
    parallel: TensorParallel, model: Path, identity: ModelIdentity, tokenizer: Path, device: torch.device
) -> None:
    """Args:
        tokenizer: that ranks compile grammars for; it need not exist.

    Raises:
        ConfigError: the ranks have different weights or tokenizers.
    """
    _check(parallel, model, "weights", identity.weights_digest, device)
    content = tokenizer.read_bytes() if tokenizer.is_file() else b""
    _check(parallel, model, "tokenizers", hashlib.sha256(content).hexdigest(), device)


def _check(parallel: TensorParallel, model: Path, what: str, digest: str, device: torch.device) -> None:
    if not parallel.agree(digest, device):
        raise ConfigError(
            f"the ranks have models with different {what}; {model} is this host's",
            field="model",
            value=str(model),
            allowed=("equal copies of one model on all hosts",),
            cure="copy the model directory of one host to the others",
        )
