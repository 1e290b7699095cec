"""Leaves out the checkpoint's layer for multi-token prediction (MTP) where a node cannot have it: its tensors are
missing or have another form, or there is no room for it. Such a layer only drafts tokens, so no node fails for it.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from baton.core.errors import ConfigError
from baton.engine.cache_size import CacheSizes, shortage
from baton.engine.device.out_of_memory import describe_out_of_memory
from baton.kvcache.spec import KVCacheSpec
from baton.models.config.model_config import ModelConfig
from baton.models.layers.parallel import TensorParallel
from baton.settings.node_config import NodeSettings

_log = logging.getLogger(__name__)
_Built = TypeVar("_Built")


class LayerLeftOut(Exception):
    """The node is built again without the layer. The message says why."""


def without_layer_if_needed(build: Callable[[NodeSettings], _Built], settings: NodeSettings, *, logs: bool) -> _Built:
    """Builds a node, and builds it again without the layer if it cannot have it.

    Args:
        logs: whether this rank logs why.
    """
    try:
        return build(settings)
    except LayerLeftOut as left_out:
        reason = str(left_out)
    # The first model's memory.
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    built = build(settings.model_copy(update={"speculation": "text"}))
    if logs:
        log_left_out(reason)
    return built


def log_left_out(reason: str) -> None:
    """Logs why the layer is not used."""
    _log.info("the checkpoint's layer for multi-token prediction is not used: %s", reason)


class LayerTrial:
    """The steps in which a node may find out that it cannot have the layer.

    Args:
        parallel: the ranks, which leave out the layer together.
        device: of tensors that their group takes.
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel, device: torch.device) -> None:
        self._tries = config.drafts
        self._parallel = parallel
        self._device = device

    @contextmanager
    def step(self, *, communicates: bool = False) -> Iterator[None]:
        """A step of all ranks.

        Args:
            communicates: ranks communicate in it. If one of several then has no memory left, the others wait for it in
                the middle of the step, so its error ends the node.

        Raises:
            LayerLeftOut: it has failed on a rank of a node that would have the layer.
        """
        if not self._tries:
            yield
            return
        problem = ""
        try:
            yield
        except (ConfigError, RuntimeError, MemoryError) as error:
            problem = str(error) if isinstance(error, ConfigError) else describe_out_of_memory(error) or ""
            waits = communicates and self._parallel.size > 1 and not isinstance(error, ConfigError)
            if not problem or waits:
                raise
        if not self._parallel.smallest(int(not problem), self._device):
            raise LayerLeftOut(problem or "another rank cannot have it")

    def check_room(
        self, settings: NodeSettings, spec: KVCacheSpec, sizes: CacheSizes, *, context_tokens: int, layer_bytes: int
    ) -> None:
        """Checks that the layer does not take the room for the longest request.

        Args:
            spec: the rank's part of the KV.
            sizes: those on which the ranks agree.
            layer_bytes: of the rank's part of the layer, if its memory would be the cache's otherwise; else 0.

        Raises:
            LayerLeftOut: it does.
        """
        if not self._tries or settings.num_blocks is not None or sizes.num_blocks is None:
            return
        on_gpu = self._device.type == "cuda"
        room = sizes.num_blocks * spec.bytes_per_token + layer_bytes // settings.block_size
        without = room // spec.without_draft.bytes_per_token

        def problem(num_blocks: int) -> str:
            return shortage(settings, spec, num_blocks=num_blocks, context_tokens=context_tokens, on_gpu=on_gpu)

        found = problem(sizes.num_blocks)
        takes_room = bool(found) and not problem(without)
        if not self._parallel.smallest(int(not takes_room), self._device):
            raise LayerLeftOut(f"with it, {found}")
