"""Checks that all ranks have the same model, because each host reads its own copy of it.

All ranks call each check together. It raises the same error on all of them.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from baton.core.errors import ConfigError
from baton.models.checkpoint.checkpoint import read_checkpoint
from baton.models.config.model_config import ModelConfig
from baton.models.layers.parallel import TensorParallel
from baton.models.loading.content_digest import content_digest
from baton.models.loading.digest_cache import DigestCache
from baton.models.loading.identity import ModelIdentity, config_digest
from baton.settings.environment import cache_directory
from baton.settings.node_config import NodeSettings

_log = logging.getLogger(__name__)
# A longer wait for the digest, after the weights were loaded, is logged.
_LONG_WAIT_S = 1.0


def check_same_config(parallel: TensorParallel, model: Path, config: ModelConfig, device: torch.device) -> None:
    """Checks that all ranks have the same configuration. Call it before anything else that ranks do together: with
    different configurations they would wait for each other in different places.

    Raises:
        ConfigError: the ranks have different models.
    """
    _check(parallel, model, "configurations", config_digest(config), device)


def check_same_files(
    parallel: TensorParallel, model: Path, identity: ModelIdentity, tokenizer: Path, device: torch.device
) -> None:
    """Checks that all ranks read the same weights and tokenizer.

    Args:
        tokenizer: the file that grammars are compiled for; it need not exist.

    Raises:
        ConfigError: the ranks have different weights or tokenizers.
    """
    _check(parallel, model, "weights", identity.weights_digest, device)
    content = tokenizer.read_bytes() if tokenizer.is_file() else b""
    _check(parallel, model, "tokenizers", hashlib.sha256(content).hexdigest(), device)


def check_same_head(parallel: TensorParallel, head: Path, digest: str, device: torch.device) -> None:
    """Checks that all ranks read the same head that drafts tokens.

    Raises:
        ConfigError: the ranks have different heads.
    """
    _check(parallel, head, "heads that draft tokens", digest, device)


@contextmanager
def hashing_content(
    parallel: TensorParallel, settings: NodeSettings, device: torch.device
) -> Iterator[Callable[[], str]]:
    """Hashes every byte of the weights while the body loads them. The first rank of each host does it for the host.

    Yields:
        A function that waits for the digest and returns it, on all ranks: "" for random weights. It raises ConfigError
            if the hosts' copies differ.
    """
    if settings.load_format == "dummy":
        yield lambda: ""
        return
    if parallel.rank % (parallel.size // settings.num_hosts or 1):
        yield lambda: _checked_content(parallel, settings.model, None, device)
        return
    with content_digest(read_checkpoint(settings.model), DigestCache(cache_directory())) as wait:

        def checked() -> str:
            began_s = time.monotonic()
            digest = wait()
            if (waited_s := time.monotonic() - began_s) > _LONG_WAIT_S:
                _log.info("hashed the weights, %.1f s after they were loaded", waited_s)
            return _checked_content(parallel, settings.model, digest, device)

        yield checked


def _checked_content(parallel: TensorParallel, model: Path, digest: str | None, device: torch.device) -> str:
    _check(parallel, model, "bytes of the weights", digest, device)
    return parallel.of_first(digest or "", device)


def _check(parallel: TensorParallel, model: Path, what: str, digest: str | None, device: torch.device) -> None:
    if not parallel.agree(digest, device):
        raise ConfigError(
            f"the ranks have models with different {what}; {model} is this host's",
            field="model",
            value=str(model),
            allowed=("equal copies of one model on all hosts",),
            cure="copy the model directory of one host to the others",
        )
