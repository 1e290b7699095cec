"""Marks in a step's forward: at a mark the KV of the first layers is in the cache while later layers still compute.

With several ranks, one rank's mark holds for all: each layer ends with a sum over the ranks, and each rank adds its
part after it has written its KV.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import nn

from baton.engine.device.capture import OnLayer
from baton.kvcache.spec import KVCacheSpec
from baton.models.config.model_config import MLAConfig, ModelConfig


@dataclass(frozen=True)
class LayerMark:
    """A mark in a step: once `event` is complete, the layers before `layer_stop` and those of an index before
    `index_stop` are computed. Without an event they are computed already."""

    layer_stop: int
    event: torch.cuda.Event | None
    device: torch.device
    index_stop: int = 0

    def wait(self) -> None:
        """Waits for the mark. Raises what the device raised."""
        if self.event is not None:
            torch.cuda.set_device(self.device)  # for the reason given in `DeviceTimer.wait`
            self.event.synchronize()


OnMark = Callable[[LayerMark], None]


def kv_stops(config: ModelConfig, spec: KVCacheSpec) -> list[int]:
    """The number of layers that have written KV after each layer of the model. Most recurrent layers write none; layers
    that read another layer's KV come last and write none."""
    if config.recurrent is not None:
        return list(accumulate(map(int, config.recurrent.kv_layers)))
    each = config.attentions_per_layer
    return [min(each * layer_stop, spec.num_layers) for layer_stop in range(1, config.num_layers + 1)]


def index_stops(config: ModelConfig) -> list[int]:
    """The number of layers that have written keys of an index after each layer of the model."""
    attention = config.attention
    index = attention.index if isinstance(attention, MLAConfig) else None
    return [0 if index is None else index.cache_layer(layer_stop) for layer_stop in range(1, config.num_layers + 1)]


# A captured step has marks at the ends of its parts only. Each part costs the host one more launch.
_PARTS = 4


class LayerMarks:
    """The marks of one model, for the thread that launches its steps.

    Args:
        kv_stops: how many layers have written KV after each layer.
        index_stops: how many have written keys of an index.
    """

    def __init__(
        self, layers: nn.ModuleList, device: torch.device, *, kv_stops: Sequence[int], index_stops: Sequence[int]
    ) -> None:
        self._num_layers = len(layers)
        self._kv_stops, self._index_stops = kv_stops, index_stops
        self._device = device
        self._layers_per_group = 1
        self._marked_groups = 0
        self._on_mark: OnMark | None = None
        self._cut: OnLayer | None = None
        for index, layer in enumerate(layers):
            layer.register_forward_hook(partial(self._computed, index + 1))

    @contextmanager
    def every(self, layers_per_group: int, on_mark: OnMark) -> Iterator[None]:
        """Marks a step in this context after every `layers_per_group` layers, except after the last layer."""
        self._layers_per_group, self._marked_groups, self._on_mark = layers_per_group, 0, on_mark
        try:
            yield
        finally:
            self._on_mark = None

    @contextmanager
    def cutting(self, cut: OnLayer) -> Iterator[None]:
        """A forward in this context calls the function after each of a few groups of layers, except after the last."""
        self._cut = cut
        try:
            yield
        finally:
            self._cut = None

    def passed(self, layer_stop: int) -> None:
        """Records that the layers before `layer_stop` are queued, and marks them if a group of layers is complete."""
        kv_stop = self._kv_stops[layer_stop - 1]
        groups = kv_stop // self._layers_per_group + (kv_stop == self._kv_stops[-1])
        if self._on_mark is None or groups == self._marked_groups or layer_stop == self._num_layers:
            return
        self._marked_groups = groups
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(blocking=True)
            event.record(torch.cuda.current_stream(self._device))
        self._on_mark(LayerMark(kv_stop, event, self._device, self._index_stops[layer_stop - 1]))

    def _computed(self, layer_stop: int, *_: object) -> None:
        if self._cut is None:
            self.passed(layer_stop)
        elif layer_stop % -(-self._num_layers // _PARTS) == 0 and layer_stop < self._num_layers:
            self._cut(layer_stop)
