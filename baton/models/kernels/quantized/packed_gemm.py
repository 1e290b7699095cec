"""Products with weights of packed integers (`baton.models.formats.packed`), whose scales are shared by groups of
inputs.

Few rows: a kernel reads the packed weight once and multiplies whole numbers less their zeros, exact in 16 bits; each
group's sum is scaled in float32. On Hopper, where weights are in strips, `packed_few` multiplies few rows and
`packed_tma` more, which from 65 rows on scales numbers in bfloat16 before it multiplies them. Many rows: pieces of the
weight are written in the activations' dtype, as `PackedWeight.dequantized` has them, and the library multiplies these.

Legend: T token, N output channel, K input channel, B byte of packed numbers.
"""

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear

from baton.models.formats.packed import RUN, STRIP, STRIP_INPUTS, PackedWeight
from baton.models.kernels.matmul.matmul import multiply_invariant
from baton.models.kernels.quantized import packed_few, packed_tma
from baton.models.kernels.quantized.packed_portable import dequantize_kernel, multiply_kernel
from baton.tritonlib.hopper_check import HopperKernels, has_hopper_kernels, probe_of
from baton.tritonlib.launch import interpreted, overlap

# Where there is no kernel for many tokens, the library multiplies more than this, unless a token's bits must not depend
# on the batch.
MAX_TOKENS = 64
_ROWS = 64  # of a tile
_DEPTH = 128  # inputs of one step, or a group's where it is smaller
_PROGRAMS_PER_SM = 4
_MIN_STEPS = 4  # of a program that shares a tile
_PIECE_BYTES = 32 << 20  # of a weight in the activations' dtype; such a piece stays in the L2 cache
_LEAST_DEPTH = 2 * RUN


@dataclass(frozen=True, eq=False)
class Product:
    """`x @ weight.T + bias` for one weight. Launches must not overlap in time.

    Attributes:
        arrived: int32 zeros, one for every tile's rows. Every launch leaves zeros.
    """

    weight: PackedWeight
    arrived: Tensor
    num_sms: int

    @classmethod
    def of(cls, weight: PackedWeight) -> "Product":
        assert weight.stored_NB.is_contiguous()  # the kernels know no strides of weights
        device, rows = weight.stored_NB.device, weight.stored_NB.shape[0]
        arrived = torch.zeros(triton.cdiv(rows, _ROWS), dtype=torch.int32, device=device)
        is_gpu = device.type == "cuda"
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 4
        return cls(weight, arrived, num_sms)

    @property
    def rows(self) -> int:
        return self.weight.stored_NB.shape[0]

    @classmethod
    def for_inputs(cls, weight: PackedWeight, dtype: torch.dtype) -> "Product":
        """Of a weight whose bytes this lays in strips if Hopper's kernels can multiply activations of this dtype."""
        product = cls.of(weight)
        is_fit = dtype == torch.bfloat16 and product.strips_step is not None
        if is_fit and has_hopper_kernels(weight.stored_NB.device, _HOPPER):
            return replace(product, weight=weight.into_strips())
        return product

    @property
    def strips_step(self) -> int | None:
        """The inputs of one step of Hopper's kernels, with one scale; None: they cannot read the weight."""
        weight, depth = self.weight, self.depth
        if weight.bits != 4 or weight.scales_GN.itemsize != 2 or depth is None or self.rows % STRIP:
            return None
        step = min(depth, weight.columns & -weight.columns)
        return step if step >= STRIP_INPUTS else None

    @property
    def depth(self) -> int | None:
        """The inputs of one step, which share one scale; None: the kernel cannot read the groups."""
        weight = self.weight
        if weight.groups_K is not None:
            return None
        if weight.group_size >= weight.columns:
            return _DEPTH
        depth = min(_DEPTH, weight.group_size & -weight.group_size)
        return depth if depth >= _LEAST_DEPTH else None

    def __call__(self, x_TK: Tensor, bias_N: Tensor | None, *, batch_invariant: bool) -> Tensor:
        x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
        if self.weight.order_K is not None and self.depth is not None:
            x_TK = x_TK.index_select(1, self.weight.order_K)
        if self.weight.in_strips:
            return self._by_strips(x_TK, bias_N, batch_invariant=batch_invariant)
        if self.depth is None or (x_TK.shape[0] > MAX_TOKENS and not batch_invariant):
            return self._by_library(x_TK, bias_N, batch_invariant=batch_invariant)
        return self.by_kernel(x_TK, bias_N, splits=1 if batch_invariant else None)

    def _by_strips(self, x_TK: Tensor, bias_N: Tensor | None, *, batch_invariant: bool) -> Tensor:
        x_TK = x_TK if packed_tma.can_be_copied(x_TK) else x_TK.clone(memory_format=torch.contiguous_format)
        num_tokens, step, arrived, num_sms = x_TK.shape[0], self.strips_step, self.arrived, self.num_sms
        assert step is not None
        if batch_invariant:
            tile = packed_tma.TILE_OF_ANY
            return packed_tma.multiply(
                x_TK, self.weight, bias_N, step=step, arrived=arrived, num_sms=num_sms, tile=tile, splits=1
            )
        if num_tokens > packed_tma.MOST_TOKENS:
            return self._by_library(x_TK, bias_N, batch_invariant=False)
        few = packed_few.choose_tile(num_tokens, self.weight, num_sms)
        if few is not None:
            return packed_few.multiply(x_TK, self.weight, bias_N, step=step, arrived=arrived, num_sms=num_sms, tile=few)
        return packed_tma.multiply(x_TK, self.weight, bias_N, step=step, arrived=arrived, num_sms=num_sms)

    def by_kernel(self, x_TK: Tensor, bias_N: Tensor | None, *, splits: int | None = None) -> Tensor:
        """Multiplies any number of tokens by the kernel; their inputs must be in the weight's order.

        Args:
            splits: programs that share a tile; None: chosen by the shapes. Tests pass others.
        """
        weight, depth, rows = self.weight, self.depth, self.rows
        assert depth is not None
        num_tokens, columns = x_TK.shape
        out_TN = torch.empty(num_tokens, rows, dtype=x_TK.dtype, device=x_TK.device)
        if not num_tokens:
            return out_TN
        tokens = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
        tiles_N, tiles_T = triton.cdiv(rows, _ROWS), triton.cdiv(num_tokens, tokens)
        steps = triton.cdiv(columns, depth)
        if splits is None:
            splits = max(1, min(_PROGRAMS_PER_SM * self.num_sms // tiles_N, steps // _MIN_STEPS))
        splits = 1 if tiles_T > 1 else min(splits, steps)
        partial = None
        if splits > 1:
            partial = torch.empty(tiles_N * splits, _ROWS, tokens, dtype=torch.float32, device=x_TK.device)
        multiply_kernel[(tiles_N * splits, tiles_T)](
            x_TK,
            weight.stored_NB,
            weight.scales_GN,
            weight.zeros_GN,
            bias_N,
            out_TN,
            partial,
            self.arrived,
            num_tokens,
            rows,
            columns,
            x_TK.stride(0),
            splits,
            GROUP=weight.group_size,
            BITS=weight.bits,
            TOKENS=tokens,
            ROWS=_ROWS,
            DEPTH=depth,
            INTERPRETED=interpreted(),
            **overlap(x_TK.device, rows=num_tokens),
            num_warps=4,
            num_stages=4,
        )
        return out_TN

    def _by_library(self, x_TK: Tensor, bias_N: Tensor | None, *, batch_invariant: bool) -> Tensor:
        if self.depth is None:
            return _multiply_plain(x_TK, self.weight.dequantized(x_TK.dtype), bias_N, batch_invariant=batch_invariant)
        out_TN = torch.empty(x_TK.shape[0], self.rows, dtype=x_TK.dtype, device=x_TK.device)
        at_once = max(_ROWS, _PIECE_BYTES // (x_TK.shape[1] * x_TK.element_size()) // _ROWS * _ROWS)
        for first in range(0, self.rows, at_once):
            part = slice(first, min(first + at_once, self.rows))
            piece_NK = self.dequantized_piece(part, x_TK.dtype)
            out_TN[:, part] = linear(x_TK, piece_NK, None if bias_N is None else bias_N[part])
        return out_TN

    def dequantized_piece(self, part: slice, dtype: torch.dtype) -> Tensor:
        """Returns some outputs of the weight, with inputs in the order of `PackedWeight.stored_NB`."""
        weight = self.weight
        rows = part.stop - part.start
        out_NK = torch.empty(rows, weight.columns, dtype=dtype, device=weight.stored_NB.device)
        dequantize_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(weight.columns, _LEAST_DEPTH * 4))](
            weight.stored_NB,
            weight.scales_GN,
            weight.zeros_GN,
            out_NK,
            part.start,
            rows,
            self.rows,
            weight.columns,
            weight.group_size,
            BITS=weight.bits,
            STRIPS=weight.in_strips,
            ROWS=_ROWS,
            RUNS=4,
            INTERPRETED=interpreted(),
            num_warps=4,
        )
        return out_NK


_HOPPER = HopperKernels(
    "products with weights of 4 bits",
    probe_of("baton.models.kernels.quantized.packed_probe", "compare_products_on_hopper"),
)


def _multiply_plain(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, *, batch_invariant: bool) -> Tensor:
    if not batch_invariant:
        return linear(x_TK, weight_NK, bias_N)
    return multiply_invariant(x_TK, weight_NK, bias_N)
