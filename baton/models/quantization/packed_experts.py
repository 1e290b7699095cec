"""A layer's experts as packed integers, one linear layer of the checkpoint after the other.

Inputs in another order (act-order) differ between experts, so only a CPU computes these.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from baton.core.errors import ConfigError
from baton.models.checkpoint.checkpoint import StoredTensor
from baton.models.config.quantization.packed_config import PackedConfig
from baton.models.formats.packed import PackedWeight, stacked
from baton.models.kernels.moe.grouped_gemm import SharedWeights
from baton.models.kernels.quantized.packed_experts import run_packed_experts
from baton.models.layers.mlp import silu_and_multiply
from baton.models.layers.moe.experts import Experts
from baton.models.quantization.packed_linear import StoredLayer, is_reordered_alike, joined

_LAYERS = ("gate_proj", "up_proj", "down_proj")


class PackedExperts(Experts):
    """Experts of packed integers.

    Args:
        replaced: the experts in the model's dtype, whose weights are not read.
        name: the checkpoint's name of the experts.

    Attributes:
        gate_up, down: of all experts, after `finish`.
    """

    def __init__(
        self,
        replaced: Experts,
        name: str,
        config: PackedConfig,
        *,
        device: torch.device | str,
        stored: Mapping[str, StoredTensor],
    ) -> None:
        num_experts, size, intermediate = replaced.down_proj.shape
        dtype = replaced.down_proj.dtype
        with torch.device("meta"):
            super().__init__(num_experts, size, intermediate, dtype=dtype)
        self.take_places_of(replaced)
        for parameter in ("gate_up_proj", "down_proj"):
            empty = torch.empty(num_experts, 0, 0, dtype=torch.uint8, device=device)
            setattr(self, parameter, nn.Parameter(empty, requires_grad=False))
        self.gate_up: PackedWeight | None = None
        self.down: PackedWeight | None = None
        self._layers: list[list[tuple[str, StoredLayer]]] = []
        shapes = ((intermediate, size), (intermediate, size), (size, intermediate))
        for expert in self.held:
            common: dict[str, Any] = {"dtype": dtype, "device": device, "stored": stored}
            self._layers.append(
                [
                    (layer, StoredLayer(self, f"{expert}_{layer}", f"{name}.{expert}.{layer}", config, shape, **common))
                    for layer, shape in zip(_LAYERS, shapes, strict=True)
                ]
            )

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        for expert, layers in zip(self.held, self._layers, strict=True):
            for name, layer in layers:
                yield from ((f"{expert}.{name}.{suffix}", view) for suffix, view in layer.views())

    def finish(self) -> None:
        """Brings the filled tensors into the form that products read.

        Raises:
            ConfigError: gate and up of an expert have different orders of inputs, or a GPU cannot follow an order.
        """
        gate_ups, downs = [], []
        for layers in self._layers:
            gate, up, down = (layer.take() for _, layer in layers)
            if not is_reordered_alike(gate, up):
                raise ConfigError(
                    "gate and up of an expert have different orders of inputs",
                    field="quantization_config",
                    allowed=("desc_act false",),
                    cure="take a checkpoint that was made with desc_act false",
                )
            gate_ups.append(joined([gate, up]))
            downs.append(down)
        self._layers = []
        self.gate_up, self.down = stacked(gate_ups), stacked(downs)
        self.gate_up_proj = nn.Parameter(self.gate_up.stored_NB, requires_grad=False)
        self.down_proj = nn.Parameter(self.down.stored_NB, requires_grad=False)
        if self.gate_up_proj.is_cuda and any(each.order_K is not None for each in (self.gate_up, self.down)):
            raise ConfigError(
                "the experts' inputs are in another order (desc_act), which no kernel for experts reads",
                field="quantization_config",
                allowed=("desc_act false",),
                cure="take a checkpoint that was made with desc_act false",
            )

    def run_grouped(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        experts_TK: Tensor,
        *,
        shared: SharedWeights | None = None,
        plus_TD: Tensor | None = None,
    ) -> Tensor:
        assert shared is None, "shared_weights is None for packed numbers"
        assert self.gate_up is not None
        assert self.down is not None
        return run_packed_experts(
            x_TD,
            weights_TK,
            self.places(experts_TK),
            self.gate_up,
            self.down,
            activate=silu_and_multiply,
            batch_invariant=self.batch_invariant,
            plus_TD=plus_TD,
            of=self.of,
        )

    def _one(self, expert: int, x_RD: Tensor) -> Tensor:
        assert self.gate_up is not None
        assert self.down is not None
        gate_up = self.gate_up.expert(expert).dequantized(x_RD.dtype)
        down = self.down.expert(expert).dequantized(x_RD.dtype)
        return self.multiply(silu_and_multiply(self.multiply(x_RD, gate_up, None)), down, None)
