"""Holds all adapters of a model on its device, in a fixed number of slots, and adds their products to linear layers.

A layer's slots are padded to one rank and never move, so captured steps stay valid while adapters come and go. The
adapters of a step's tokens are in `CausalLM.adapter_rows`, tensors that a captured step computes again in each replay.
A rank with part of a layer's outputs has the same rows of B and the whole A. A rank with part of the inputs has the
same columns of A and the whole B; the sum over ranks after the layer then adds up the adapter's product too.

Legend: as in `baton.models.kernels.adapter_products`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attention.mla import MLAAttention
from baton.models.adapters.adapter import Adapter, LayerDelta, LayerShape
from baton.models.adapters.experts import AdaptedExperts
from baton.models.adapters.layer import AdaptedLayer, SideStream
from baton.models.checkpoint.names import renamed
from baton.models.checkpoint.share import Share
from baton.models.config.model_config import ModelConfig
from baton.models.kernels.adapter_rows import AdapterRows, group_by_adapter
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.linear import FusedLinear, Linear
from baton.models.layers.moe.experts import Experts
from baton.models.layers.parallel import SINGLE, TensorParallel
from baton.models.loading.shares import Shares

# Ranks of slots are multiples of this, for the tensor cores.
RANK_MULTIPLE = 16
# The head, and OPT's projection before it.
_OF_LOGITS = ("lm_head", "project_out")
# Adapters have no parts for the layer that drafts tokens.
_DRAFT_LAYERS = ("mtp.", "eagle.")


@dataclass(frozen=True)
class _Part:
    """One of a checkpoint's layers inside a layer of the model.

    Args:
        start: index of the part's first output in the model's layer.
        place: the expert's place in this rank's memory.
    """

    layer: AdaptedLayer
    index: int
    start: int
    outputs: int
    share: Share | None
    place: int = 0


class AdapterBank:
    """The slots for adapters of one model, or of one rank's part of it.

    Attributes:
        layers: shapes of the layers that can have adapters, by their names in the checkpoint, including experts on
            other ranks.
        rank: the largest rank that an adapter may have.
    """

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        *,
        count: int,
        rank: int,
        experts: bool = False,
        parallel: TensorParallel = SINGLE,
        batch_invariant: bool = False,
    ) -> None:
        """Allocates the slots and hooks the products into the model's linear layers.

        Args:
            model: loaded and post-processed.
            config: of the whole model.
            experts: slots include matrices of routed experts.
        """
        self._model = model
        self.count, self.rank = count, rank
        self._batch_invariant = batch_invariant
        padded = -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE
        shares = Shares(config, parallel)
        dtype = model.model.embed_tokens.weight.dtype
        self._adapted: list[AdaptedLayer] = []
        self._parts: dict[str, list[_Part]] = {}
        device = model.model.embed_tokens.weight.device
        side = SideStream(device) if device.type == "cuda" else None
        for path, module in _adaptable(model):
            sizes = [rows for _, rows in module.parts] if isinstance(module, FusedLinear) else [module.out_features]
            layer = AdaptedLayer(
                module.in_features, sizes, slots=count, rank=padded, dtype=dtype, device=device, side=side
            )
            self._adapted.append(layer)
            start = 0
            for index, (name, outputs) in enumerate(zip(_names(model, path, module), layer.sizes, strict=True)):
                self._parts[name] = [_Part(layer, index, start, outputs, shares.of(f"{name}.weight"))]
                start += outputs
            module.has_adapters = True
            module.register_forward_pre_hook(self._pre_hook(layer))
            module.register_forward_hook(self._hook(layer))
        self.layers: dict[str, LayerShape] = {name: _whole_shape(parts[0]) for name, parts in self._parts.items()}
        if experts:
            self.layers |= self._adapt_experts(padded, dtype, shares)
        model.find_adapters = self.rows_of

    @property
    def bytes_per_slot(self) -> int:
        weights = [layer.weights for layer in self._adapted]
        return sum(each.a_SQK.nbytes + each.b_SNR.nbytes for each in weights) // max(1, self.count)

    def rows_of(self, slots_T: Tensor) -> AdapterRows:
        """Computes what the layers' products need about a step's tokens; call it once at the beginning of the step."""
        if not slots_T.is_cuda:
            return AdapterRows(slots_T, None, None, 0)
        return group_by_adapter(slots_T, num_slots=self.count, batch_invariant=self._batch_invariant)

    def load(self, slot: int, adapter: Adapter) -> None:
        """Fills a slot. Steps that are already queued still compute with its previous content.

        Args:
            adapter: already checked against `layers`, with a rank of at most `rank`.
        """
        for each in self._adapted:
            each.clear(slot, stride=self.count)
        for name, delta in adapter.layers.items():
            for part in self._parts.get(name, ()):  # empty for another rank's expert
                self._fill_part(part, slot, delta)

    def _fill_part(self, part: _Part, slot: int, delta: LayerDelta) -> None:
        weights, rank, share = part.layer.weights, delta.a.shape[0], part.share
        first, own = part.index * weights.rank, part.place * self.count + slot
        a_RK = weights.a_SQK[own, first : first + rank]
        b_NR = weights.b_SNR[own, part.start : part.start + part.outputs, :rank]
        _fill(a_RK, delta.a, share if share is not None and share.dim == 1 else None)
        _fill(b_NR, delta.b, share if share is not None and share.dim == 0 else None)
        weights.scale_SP[own, part.index] = delta.scale

    def _adapt_experts(self, rank: int, dtype: torch.dtype, shares: Shares) -> dict[str, LayerShape]:
        """Hooks products into routed experts; returns the layers of all experts, including other ranks'."""
        shapes: dict[str, LayerShape] = {}
        for path, module in self._model.named_modules():
            if type(module) is not Experts or module.down_proj.dtype != dtype or path.startswith(_DRAFT_LAYERS):
                continue
            adapted = AdaptedExperts(
                module, self._current_rows, count=self.count, rank=rank, batch_invariant=self._batch_invariant
            )
            module.adapted = adapted
            self._adapted += (adapted.gate_up, adapted.down)
            prefix = renamed(path, self._model.prefixes)
            inner, size = adapted.gate_up.sizes[0], adapted.down.sizes[0]
            for layer, index, name, outputs in (
                (adapted.gate_up, 0, "gate_proj", inner),
                (adapted.gate_up, 1, "up_proj", inner),
                (adapted.down, 0, "down_proj", size),
            ):
                share = shares.of(f"{prefix}.{module.held[0]}.{name}.weight")
                parts = [_Part(layer, index, index * inner, outputs, share, place) for place in range(len(module.held))]
                for expert, part in zip(module.held, parts, strict=True):
                    self._parts.setdefault(f"{prefix}.{expert}.{name}", []).append(part)
                shape = _whole_shape(parts[0])
                shapes |= {f"{prefix}.{expert}.{name}": shape for expert in range(module.of or len(module.held))}
        return shapes

    def _current_rows(self) -> AdapterRows | None:
        return self._model.adapter_rows

    def _pre_hook(self, layer: AdaptedLayer) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def begin(_: nn.Module, inputs: tuple[Tensor]) -> None:
            rows = self._model.adapter_rows
            if rows is not None:
                layer.begin(inputs[0], rows)

        return begin

    def _hook(self, layer: AdaptedLayer) -> Callable[[nn.Module, tuple[Tensor], Tensor], None]:
        def add(_: nn.Module, inputs: tuple[Tensor], out_TN: Tensor) -> None:
            rows = self._model.adapter_rows
            if rows is not None:
                layer.add(inputs[0], out_TN, rows, batch_invariant=self._batch_invariant)

        return add


def _adaptable(model: CausalLM) -> Iterator[tuple[str, Linear]]:
    """Yields the linear layers that can have adapters, with their paths. Layers of the logits are left out, because
    their rows are not a step's tokens, and so are layers whose weights latent attention splits, and the MTP layer."""
    taken_apart = {id(module.kv_b_proj) for module in model.modules() if isinstance(module, MLAAttention)}
    for path, module in model.named_modules():
        left_out = path in _OF_LOGITS or path.startswith(_DRAFT_LAYERS) or id(module) in taken_apart
        if isinstance(module, Linear) and not left_out:
            yield path, module


def _names(model: CausalLM, path: str, layer: Linear) -> list[str]:
    """Returns the checkpoint's names of the layer's parts, without `.weight`."""
    parent = path.rpartition(".")[0]
    paths = [f"{parent}.{part}" for part, _ in layer.parts] if isinstance(layer, FusedLinear) else [path]
    return [renamed(each, model.prefixes) for each in paths]


def _whole_shape(part: _Part) -> LayerShape:
    inputs, share = part.layer.weights.a_SQK.shape[2], part.share
    if share is None:
        return LayerShape(inputs, part.outputs)
    return LayerShape(inputs, share.size) if share.dim == 0 else LayerShape(share.size, part.outputs)


def _fill(target: Tensor, whole: Tensor, share: Share | None) -> None:
    """Copies the rank's part. The rest of the target is unchanged and must already be zero."""
    if share is None:
        target.copy_(whole)
        return
    filled = 0
    for part in share.ranges:
        held = target.narrow(share.dim, filled, len(part))
        held.copy_(whole.narrow(share.dim, part.start, len(part)))
        filled += len(part)
