"""All adapters of a model on its device, in a fixed number of slots, and the product that each linear layer adds.

A layer's slots are padded to one rank and never move, so captured steps stay valid while adapters come and go. The
adapters of a step's tokens are in `CausalLM.adapter_rows`, tensors that a captured step computes again in each replay.
A rank that has part of a layer's outputs has these rows of B and the whole A; one that has part of the inputs has these
columns of A and the whole B, and the sum over ranks that follows the layer adds up the adapter's product too.

Legend: as in `models.kernels.adapter_products`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from attention.mla import MLAAttention
from models.adapters.adapter import Adapter, LayerShape
from models.causal_lm import CausalLM
from models.config.model_config import ModelConfig
from models.kernels.adapter_products import AdapterRows, SlotWeights, expand, group_by_adapter, shrink
from models.kernels.matmul import multiply_invariant
from models.linear import FusedLinear, Linear, Multiply
from models.parallel import SINGLE, TensorParallel
from models.weights.names import renamed
from models.weights.shares import Share, Shares
from tritonlib.launch import MOST_OVERLAPPING_ROWS

# Ranks of slots are multiples of this, for the tensor cores.
RANK_MULTIPLE = 16
# Up to this many tokens, shrink comes before the layer's own product, which overlaps with it.
MOST_SHRUNK_BEFORE = MOST_OVERLAPPING_ROWS
# The head, and OPT's layer before it.
_OF_LOGITS = ("lm_head", "project_out")


@dataclass(frozen=True)
class _Part:
    """One of a checkpoint's layers within a layer of the model. `start`: its first output there."""

    layer: "AdaptedLayer"
    index: int
    start: int
    outputs: int
    share: Share | None


class AdaptedLayer:
    """A linear layer's part of every slot."""

    def __init__(self, layer: Linear, count: int, rank: int, *, dtype: torch.dtype) -> None:
        sizes = [rows for _, rows in layer.parts] if isinstance(layer, FusedLinear) else [layer.out_features]
        device, parts = layer.weight.device, len(sizes)
        self.sizes, self.rank = sizes, rank
        self.weights = SlotWeights(
            torch.zeros(count, parts * rank, layer.in_features, dtype=dtype, device=device),
            torch.zeros(count, layer.out_features, rank, dtype=dtype, device=device),
            torch.zeros(count, parts, dtype=torch.float32, device=device),
            tuple(sizes),
        )
        self._sums_TQC: Tensor | None = None

    def begin(self, x_TK: Tensor, rows: AdapterRows) -> None:
        """Before the layer is computed: its kernel loads weights while shrink runs, if they overlap."""
        early = x_TK.is_cuda and len(x_TK) <= MOST_SHRUNK_BEFORE
        self._sums_TQC = self._shrink(x_TK, rows) if early else None

    def add(self, x_TK: Tensor, out_TN: Tensor, rows: AdapterRows, *, batch_invariant: bool) -> None:
        """Adds each token's product to the layer's result, in place."""
        if x_TK.is_cuda:
            sums_TQC, self._sums_TQC = self._sums_TQC, None
            expand(self._shrink(x_TK, rows) if sums_TQC is None else sums_TQC, out_TN, rows, self.weights)
        else:
            multiply: Multiply = multiply_invariant if batch_invariant else linear
            add_in_torch(x_TK, out_TN, rows.slots_T, self.weights, multiply)

    def _shrink(self, x_TK: Tensor, rows: AdapterRows) -> Tensor:
        return shrink(x_TK if x_TK.stride(-1) == 1 else x_TK.contiguous(), rows, self.weights)

    def clear(self, slot: int) -> None:
        for each in (self.weights.a_SQK, self.weights.b_SNR, self.weights.scale_SP):
            each[slot].zero_()


def add_in_torch(
    x_TK: Tensor, out_TN: Tensor, slots_T: Tensor, weights: SlotWeights, multiply: Multiply = linear
) -> None:
    """The reference of `add_products`, one adapter after the other. The host waits for the slots."""
    for slot in slots_T.unique().tolist():
        if slot < 0:
            continue
        (tokens,) = torch.nonzero(slots_T == slot, as_tuple=True)
        shrunk = multiply(x_TK[tokens], weights.a_SQK[slot], None).split(weights.rank, dim=1)
        sums = [
            multiply(h, b, None).float() * scale
            for h, b, scale in zip(
                shrunk, weights.b_SNR[slot].split(weights.sizes), weights.scale_SP[slot], strict=True
            )
        ]
        out_TN[tokens] = (out_TN[tokens].float() + torch.cat(sums, dim=1)).to(out_TN.dtype)


class AdapterBank:
    """The slots of one model, or of one rank's part of it.

    Attributes:
        layers: shapes of the layers that can have adapters, by their names in the checkpoint.
        rank: the largest rank of an adapter.
    """

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        *,
        count: int,
        rank: int,
        parallel: TensorParallel = SINGLE,
        batch_invariant: bool = False,
    ) -> None:
        """Allocates the slots, and makes the model's linear layers add their products.

        Args:
            model: loaded and post-processed.
            config: of the whole model.
        """
        self._model = model
        self.count, self.rank = count, rank
        self._batch_invariant = batch_invariant
        padded = -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE
        shares = Shares(config, parallel)
        dtype = model.model.embed_tokens.weight.dtype
        self._adapted: list[AdaptedLayer] = []
        self._parts: dict[str, _Part] = {}
        for path, module in _adaptable(model):
            layer = AdaptedLayer(module, count, padded, dtype=dtype)
            self._adapted.append(layer)
            start = 0
            for index, (name, outputs) in enumerate(zip(_names(model, path, module), layer.sizes, strict=True)):
                self._parts[name] = _Part(layer, index, start, outputs, shares.of(f"{name}.weight"))
                start += outputs
            module.has_adapters = True
            module.register_forward_pre_hook(self._pre_hook(layer))
            module.register_forward_hook(self._hook(layer))
        self.layers: Mapping[str, LayerShape] = {name: _whole_shape(part) for name, part in self._parts.items()}
        model.find_adapters = self.rows_of

    def rows_of(self, slots_T: Tensor) -> AdapterRows:
        """What the layers' products need to know of a step's tokens: computed once, at the beginning of the step."""
        if not slots_T.is_cuda:
            return AdapterRows(slots_T, None, None, 0)
        return group_by_adapter(slots_T, num_slots=self.count, batch_invariant=self._batch_invariant)

    def load(self, slot: int, adapter: Adapter) -> None:
        """Fills a slot. Steps that are queued already, and use it, still compute what it had.

        Args:
            adapter: checked against `layers`, of at most `rank`.
        """
        for each in self._adapted:
            each.clear(slot)
        for name, delta in adapter.layers.items():
            part = self._parts[name]
            weights, rank = part.layer.weights, delta.a.shape[0]
            first = part.index * weights.rank
            a_RK = weights.a_SQK[slot, first : first + rank]
            b_NR = weights.b_SNR[slot, part.start : part.start + part.outputs, :rank]
            share = part.share
            _fill(a_RK, delta.a, share if share is not None and share.dim == 1 else None)
            _fill(b_NR, delta.b, share if share is not None and share.dim == 0 else None)
            weights.scale_SP[slot, part.index] = delta.scale

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
    """The linear layers with their paths, without those of the logits, which have other rows than a step's tokens, and
    without those whose weights latent attention takes apart."""
    taken_apart = {id(module.kv_b_proj) for module in model.modules() if isinstance(module, MLAAttention)}
    for path, module in model.named_modules():
        if isinstance(module, Linear) and path not in _OF_LOGITS and id(module) not in taken_apart:
            yield path, module


def _names(model: CausalLM, path: str, layer: Linear) -> list[str]:
    """The checkpoint's names of the layer's parts, without `.weight`."""
    parent = path.rpartition(".")[0]
    paths = [f"{parent}.{part}" for part, _ in layer.parts] if isinstance(layer, FusedLinear) else [path]
    return [renamed(each, model.checkpoint_prefixes) for each in paths]


def _whole_shape(part: _Part) -> LayerShape:
    inputs, share = part.layer.weights.a_SQK.shape[2], part.share
    if share is None:
        return LayerShape(inputs, part.outputs)
    return LayerShape(inputs, share.size) if share.dim == 0 else LayerShape(share.size, part.outputs)


def _fill(target: Tensor, whole: Tensor, share: Share | None) -> None:
    """Copies the rank's part; the rest of the target stays zero."""
    if share is None:
        target.copy_(whole)
        return
    filled = 0
    for part in share.ranges:
        held = target.narrow(share.dim, filled, len(part))
        held.copy_(whole.narrow(share.dim, part.start, len(part)))
        filled += len(part)
