"""Counts on the device how many tokens each place of each layer's experts gets, also within captured steps.

Every rank routes every token, so each rank has the whole counts. Legend: L layer with experts, P place on some rank, T
token of the step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.core.expert_load import ExpertLoad, LayerLoad
from baton.models.config.expert_places import ExpertPlacement


class ExpertCounts:
    """The counters of one model.

    Args:
        layers: numbers of the layers with experts.
        num_places: of each layer, over all ranks.

    Attributes:
        tokens_LP: int64; the counts only rise until `reset`.
        slots_T: slots of the step's tokens, below 0 for padding; None: the step is not counted. A captured step's
            memory must not move.
    """

    def __init__(self, layers: Sequence[int], num_places: int, device: torch.device | str) -> None:
        self.layers = tuple(layers)
        self.tokens_LP = torch.zeros(len(self.layers), num_places, dtype=torch.int64, device=device)
        self.slots_T: Tensor | None = None

    def of_layer(self, index: int) -> "LayerCounts":
        return LayerCounts(self, self.tokens_LP[self.layers.index(index)])

    def reset(self) -> None:
        self.tokens_LP.zero_()

    def fetch(self) -> "FetchedCounts":
        """Starts copying the counts after the steps queued so far. The host does not wait."""
        return FetchedCounts(self.layers, self.tokens_LP)


@dataclass(frozen=True)
class LayerCounts:
    """One layer's counters, for its experts. `tokens_P` is a view."""

    of_model: ExpertCounts
    tokens_P: Tensor


class FetchedCounts:
    """Counts that are being copied to the host."""

    def __init__(self, layers: Sequence[int], tokens_LP: Tensor) -> None:
        self._layers = layers
        self._event: torch.cuda.Event | None = None
        on_gpu = tokens_LP.is_cuda
        self._host_LP = torch.empty(tokens_LP.shape, dtype=torch.int64, pin_memory=on_gpu)
        self._host_LP.copy_(tokens_LP, non_blocking=True)
        if on_gpu:
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Mapping[int, tuple[int, ...]]:
        """Waits for the counts and returns the tokens of each place, by layer. Any thread may call it. Raises device
        errors."""
        if self._event is not None:
            self._event.synchronize()
        return {layer: tuple(row) for layer, row in zip(self._layers, self._host_LP.tolist(), strict=True)}


def expert_load(placement: ExpertPlacement, counts: Mapping[int, Sequence[int]], *, model: str) -> ExpertLoad:
    """Summarizes the counts as the load of experts and ranks.

    Args:
        counts: tokens of each place, by layer.
        model: its name.
    """
    layers = [
        LayerLoad(layer=index, tokens=places.of_experts(counts[index]), rank_tokens=places.of_ranks(counts[index]))
        for index, places in placement.mixtures
    ]
    return ExpertLoad(model=model, redundant_experts=placement.redundant, layers=tuple(layers))
