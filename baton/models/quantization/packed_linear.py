"""Linear layers whose weights stay packed integers.

On a GPU a kernel multiplies few rows by the packed numbers, and more rows by pieces of the weight in the activations'
dtype. Elsewhere the whole weight is dequantized for each product.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from baton.core.errors import ConfigError
from baton.models.checkpoint.checkpoint import StoredTensor
from baton.models.checkpoint.tensor_reader import TORCH_DTYPES
from baton.models.config.quantization.packed_config import PackedConfig, StoredPart, TensorRole
from baton.models.formats.packed import PackedWeight, numbers_of
from baton.models.kernels.quantized import packed_gemm
from baton.models.layers.linear import FusedLinear, Linear


class StoredLayer:
    """The stored tensors of one linear layer, allocated as parameters of `module` until they are taken.

    Args:
        name: the layer's, in the checkpoint.
        stored: the checkpoint; empty for random weights.
    """

    def __init__(
        self,
        module: nn.Module,
        key: str,
        name: str,
        config: PackedConfig,
        shape: tuple[int, int],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        stored: Mapping[str, StoredTensor],
    ) -> None:
        self.config, self.shape, self._name = config, shape, name
        self._module, self._parameters = module, dict[TensorRole, tuple[StoredPart, str]]()
        for role, layout in config.tensors.items():
            found = stored.get(f"{name}.{layout.suffix}")
            if layout.optional and found is None:
                continue
            if not stored and role is TensorRole.GROUPS:
                continue
            parameter = f"{key}_{layout.suffix}"
            kind = TORCH_DTYPES[layout.dtype] if layout.dtype else _float_of(found, dtype)
            sizes = list(layout.shape(*shape))
            if found is not None and layout.inputs is not None and config.cut_whole(layout):
                # The groups of all ranks, because a rank may have inputs of any group.
                sizes[layout.inputs.dim] = self._groups_of_all_inputs(stored)
            empty = torch.empty(sizes, dtype=kind, device=device)
            module.register_parameter(parameter, nn.Parameter(empty, requires_grad=False))
            self._parameters[role] = (layout, parameter)

    def _groups_of_all_inputs(self, stored: Mapping[str, StoredTensor]) -> int:
        groups, size = (
            stored.get(f"{self._name}.{self.config.tensors[TensorRole.GROUPS].suffix}"),
            self.config.group_size,
        )
        return 1 if groups is None or size is None else -(-math.prod(groups.shape) // size)

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (suffix, memory that the tensor fills)."""
        for layout, parameter in self._parameters.values():
            yield layout.suffix, getattr(self._module, parameter).data

    def take(self) -> PackedWeight:
        """Returns the weight of the filled tensors and frees their memory.

        Raises:
            ConfigError: a scale is not finite, or an input's group has no scale.
        """
        tensors = {role: getattr(self._module, parameter).data for role, (_, parameter) in self._parameters.items()}
        for _, parameter in self._parameters.values():
            delattr(self._module, parameter)
        self._check(tensors)
        return numbers_of(tensors, self.config, *self.shape)

    def _check(self, tensors: Mapping[TensorRole, Tensor]) -> None:
        name, layouts, scales = self._name, self.config.tensors, tensors[TensorRole.SCALES]
        if not bool(scales.isfinite().all()):
            raise _damaged(f"{name}.{layouts[TensorRole.SCALES].suffix} is not finite everywhere", "finite numbers")
        groups = tensors.get(TensorRole.GROUPS)
        if groups is not None:
            inputs = layouts[TensorRole.SCALES].inputs
            assert inputs is not None
            last = scales.shape[inputs.dim] - 1
            if not bool(((groups >= 0) & (groups <= last)).all()):
                raise _damaged(
                    f"{name}.{layouts[TensorRole.GROUPS].suffix} has groups outside 0 to {last}", f"0 to {last}"
                )


def _damaged(problem: str, allowed: str) -> ConfigError:
    return ConfigError(problem, field="model", allowed=(allowed,), cure="download the checkpoint again")


def _float_of(stored: StoredTensor | None, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the scales, which keep the precision of the file."""
    kind = dtype if stored is None else TORCH_DTYPES.get(stored.dtype, dtype)
    return kind if kind.is_floating_point else dtype


class PackedLinear(FusedLinear):
    """A linear layer of packed integers: one of a checkpoint's layers, or several fused.

    Args:
        replaced: the layer in the model's dtype. Its bias is kept, its weight is not read.
        name: the checkpoint's name of the layer; a fused layer's parts replace its last word.

    Attributes:
        batch_invariant: a token's bits must not depend on the rest of the batch. Where weights are dequantized,
            `multiply` ensures that.
        weights: of runs of outputs, after `finish`: one, unless parts have different orders of inputs.
    """

    def __init__(
        self,
        replaced: Linear,
        name: str,
        config: PackedConfig,
        *,
        device: torch.device | str,
        stored: Mapping[str, StoredTensor],
    ) -> None:
        parent, _, own = name.rpartition(".")
        parts = replaced.parts if isinstance(replaced, FusedLinear) else ((own, replaced.out_features),)
        with torch.device("meta"):
            super().__init__(replaced.in_features, parts, dtype=replaced.weight.dtype, bias=False)
        self.bias = replaced.bias
        self.dtype = replaced.weight.dtype
        self.weight = nn.Parameter(torch.empty(0, dtype=torch.uint8, device=device), requires_grad=False)
        self.batch_invariant = False
        self.weights: tuple[PackedWeight, ...] = ()
        self._products: tuple[packed_gemm.Product, ...] = ()
        self._layers = [
            StoredLayer(
                self,
                part,
                f"{parent}.{part}",
                config,
                (rows, replaced.in_features),
                dtype=self.dtype,
                device=device,
                stored=stored,
            )
            for part, rows in parts
        ]

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        for (part, _), layer in zip(self.parts, self._layers, strict=True):
            yield from ((f"{part}.{suffix}", view) for suffix, view in layer.views())
        if self.bias is not None:
            sizes = [rows for _, rows in self.parts]
            for (part, _), view in zip(self.parts, torch.split(self.bias.data, sizes), strict=True):
                yield f"{part}.bias", view

    def finish(self) -> None:
        """Brings the filled tensors into the form that products read."""
        weights: list[PackedWeight] = []
        for layer in self._layers:
            weight = layer.take()
            if weights and is_reordered_alike(weights[-1], weight):
                weight = joined([weights.pop(), weight])
            weights.append(weight)
        self._layers = []
        if self.weight.is_cuda:
            self._products = tuple(packed_gemm.Product.for_inputs(weight, self.dtype) for weight in weights)
            weights = [product.weight for product in self._products]
        self.weights = tuple(weights)
        if len(weights) == 1:
            self.weight = nn.Parameter(weights[0].stored_NB, requires_grad=False)

    def dequantize_(self) -> None:
        """Becomes a layer in the model's dtype, for code that reads its weights other than by products."""
        self.weight = nn.Parameter(self.dequantized(self.dtype), requires_grad=False)
        self.weights = self._products = ()

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        assert self.weights, "finish was not called"
        return torch.cat([weight.dequantized(dtype) for weight in self.weights])

    def forward(self, input: Tensor) -> Tensor:
        if not self.weights:
            out: Tensor = super().forward(input)
            return out
        if not self._products:
            return self.multiply(input, self.dequantized(input.dtype), self.bias)
        x_TK = input.flatten(0, -2)
        outs, first = [], 0
        for product in self._products:
            bias = None if self.bias is None else self.bias[first : first + product.rows]
            outs.append(product(x_TK, bias, batch_invariant=self.batch_invariant))
            first += product.rows
        out_TN = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        return out_TN.view(*input.shape[:-1], self.out_features)


def is_reordered_alike(one: PackedWeight, other: PackedWeight) -> bool:
    pairs = ((one.order_K, other.order_K), (one.groups_K, other.groups_K))
    return all(
        mine is theirs or (mine is not None and theirs is not None and torch.equal(mine, theirs))
        for mine, theirs in pairs
    )


def joined(weights: list[PackedWeight]) -> PackedWeight:
    """Joins weights with the same order of inputs to one weight with all outputs."""
    first = weights[0]
    zeros = [weight.zeros_GN for weight in weights if weight.zeros_GN is not None]
    return PackedWeight(
        torch.cat([weight.stored_NB for weight in weights]),
        torch.cat([weight.scales_GN for weight in weights], dim=1),
        torch.cat(zeros, dim=1) if zeros else None,
        first.bits,
        first.columns,
        first.group_size,
        first.order_K,
        first.groups_K,
    )
