"""Norms that model families share. Parameters are allocated but not initialized; the loader fills every one.

On a GPU one kernel does the work of several torch calls, with the same roundings as torch. Shapes: T token, D hidden
channel, H head, C head channel.
"""

from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

from baton.models.kernels import norms
from baton.models.kernels.quantized.rows import QuantizedRows
from baton.models.layers.parallel import DeferredSum, ParallelModule, TensorParallel, sum_now
from baton.models.layers.row_reader import RowReader


class RMSNorm(nn.Module):
    """x / sqrt(mean(x ** 2) + eps) * (weight_offset + weight), in float32, rounded once."""

    weight_offset: ClassVar[int] = 0

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return norms.rms_norm(x_TD, self) if x_TD.is_cuda else self._in_torch(x_TD)

    def add_and_norm(
        self, stream_TD: Tensor, update_TD: Tensor | DeferredSum | None, *, update_norm: "RMSNorm | None" = None
    ) -> Tensor:
        """Adds the update to the residual stream in place and returns the normalized sum.

        Args:
            update_TD: None before the first layer, where there is nothing to add yet.
            update_norm: applied to the update before it is added.
        """
        if update_TD is None:
            return self.forward(stream_TD)
        if isinstance(update_TD, DeferredSum):
            normed_TD = update_TD.add_and_norm(stream_TD, self, update_norm=update_norm)
            assert isinstance(normed_TD, Tensor), "without a row format"
            return normed_TD
        if stream_TD.is_cuda:
            return norms.add_rms_norm(stream_TD, update_TD, self, update_norm=update_norm)
        return self._in_torch(stream_TD.add_(update_TD if update_norm is None else update_norm(update_TD)))

    def add_and_norm_for(
        self,
        reader: nn.Module | None,
        stream_TD: Tensor,
        update_TD: Tensor | DeferredSum | None,
        *,
        update_norm: "RMSNorm | None" = None,
    ) -> Tensor | QuantizedRows:
        """Does what `add_and_norm` does. The result is quantized if `reader` can read it so, which spares `reader` a
        launch and changes no bit of what it computes.

        Args:
            reader: the only module that reads the result; None: several do.
        """
        row_format = reader.row_format(len(stream_TD)) if isinstance(reader, RowReader) else None
        if row_format is None:
            return self.add_and_norm(stream_TD, update_TD, update_norm=update_norm)
        if isinstance(update_TD, DeferredSum):
            return update_TD.add_and_norm(stream_TD, self, update_norm=update_norm, row_format=row_format)
        return norms.norm_and_quantize(stream_TD, update_TD, self, row_format, update_norm=update_norm)

    def _in_torch(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * (weight_offset + weight) + bias."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, bias: bool = True, weight_offset: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype)) if bias else None
        self.eps, self.weight_offset = eps, weight_offset

    def forward(self, x_TD: Tensor) -> Tensor:
        weight_D = self.weight + self.weight_offset if self.weight_offset else self.weight
        return layer_norm(x_TD, weight_D.shape, weight_D, self.bias, self.eps)


class CenteredNorm(nn.Module):
    """A layer norm without bias: (x - mean(x)) / sqrt(var(x) + eps) * weight, rounded once."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return layer_norm(x_TD, self.weight.shape, self.weight, None, self.eps)

    def add_and_norm(self, stream_TD: Tensor, update_TD: Tensor | DeferredSum | None) -> Tensor:
        """Does what `RMSNorm.add_and_norm` does."""
        return self.forward(stream_TD if update_TD is None else stream_TD.add_(sum_now(update_TD)))


class NormOfEachHead(ParallelModule):
    """Layer norms without biases, one for each head. Every rank has all weights and uses those of its heads.

    Args:
        num_heads: of the whole model.
        held: returns a rank's heads among `num_heads`.
    """

    def __init__(
        self,
        num_heads: int,
        size: int,
        *,
        held: Callable[[int, TensorParallel], range],
        eps: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, size, dtype=dtype))
        self.held, self.eps = held, eps

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (checkpoint's tensor name, relative to this layer; the row that it fills)."""
        for head, row in enumerate(self.weight.data):
            yield f"norms.{head}.weight", row

    def forward(self, x_THC: Tensor) -> Tensor:
        heads = self.held(len(self.weight), self.parallel)
        normed_THC = layer_norm(x_THC.float(), x_THC.shape[-1:], eps=self.eps)
        return (normed_THC * self.weight[heads.start : heads.stop].float()).to(x_THC.dtype)
