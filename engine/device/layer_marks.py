"""Marks in a step's forward: behind so many layers, whose KV is then in the cache while later ones still compute.

Where several ranks compute a model together, one rank's mark holds for all: a layer ends with a sum over the ranks, to
which each adds its part after it has written its KV. Knows neither rows nor requests.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn


@dataclass(frozen=True)
class LayerMark:
    """The layers in front of `layer_stop` are computed once `event` has come; None: they are now."""

    layer_stop: int
    event: torch.cuda.Event | None
    device: torch.device

    def wait(self) -> None:
        """Raises what the device raised."""
        if self.event is not None:
            torch.cuda.set_device(self.device)  # as `DeviceTimer.wait` does, and for its reason
            self.event.synchronize()


OnMark = Callable[[LayerMark], None]


class LayerMarks:
    """For one model. Used by the thread that launches its steps."""

    def __init__(self, layers: nn.ModuleList, device: torch.device) -> None:
        self._num_layers = len(layers)
        self._device = device
        self._layers_per_group = 0
        self._on_mark: OnMark | None = None
        for index, layer in enumerate(layers):
            layer.register_forward_hook(partial(self._passed, index + 1))

    @contextmanager
    def every(self, layers_per_group: int, on_mark: OnMark) -> Iterator[None]:
        """A forward inside of this is marked behind so many layers each, but not behind the last: there is its end."""
        self._layers_per_group, self._on_mark = layers_per_group, on_mark
        try:
            yield
        finally:
            self._on_mark = None

    def _passed(self, layer_stop: int, *_: object) -> None:
        if self._on_mark is None or layer_stop % self._layers_per_group or layer_stop == self._num_layers:
            return
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event(blocking=True)
            event.record(torch.cuda.current_stream(self._device))
        self._on_mark(LayerMark(layer_stop, event, self._device))
