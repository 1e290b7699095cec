"""Linear layers whose weights stay in fp8.

On a GPU that multiplies fp8, activations are rounded to fp8 as the checkpoint says, for batches of every size: one
scale for 128 channels of a token where weights have blocks, else one for each token, or one from the checkpoint for
all. Elsewhere weights are dequantized to the activations' dtype, and activations are not rounded.

Legend: T token, N output channel, K input channel, R C rows and columns of scales.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from baton.models.config.quantization.config import FP8_BLOCK, Fp8Config, Granularity
from baton.models.formats import fp8
from baton.models.kernels.quantized import few_tokens, fp8_gemm, fp8_library
from baton.models.kernels.quantized.rows import QuantizedRows, RowFormat, quantize
from baton.models.layers.linear import FusedLinear, Linear
from baton.tritonlib.hopper_check import has_hopper_kernels


class Fp8Linear(FusedLinear):
    """An fp8 linear layer: one of a checkpoint's layers, or several fused.

    Each part keeps its own scales. They become rows of scales, each for a number of output channels that divides every
    part.

    Args:
        replaced: the layer in the model's dtype. Its bias is kept, its weight is not read.
        name: the checkpoint's name of a single layer; the parts of a fused one have names of their own.

    Attributes:
        batch_invariant: a token's bits must not depend on the rest of the batch. Where weights are dequantized,
            `multiply` ensures that.
        scale_RC: None until `finish`, and after `dequantize_`.
    """

    def __init__(self, replaced: Linear, name: str, config: Fp8Config, *, device: torch.device | str) -> None:
        parts = replaced.parts if isinstance(replaced, FusedLinear) else ((name, replaced.out_features),)
        with torch.device(device):
            super().__init__(replaced.in_features, parts, dtype=fp8.E4M3, bias=False)
        self.bias = replaced.bias
        self.dtype = replaced.weight.dtype
        self.config = config
        self.batch_invariant = False
        self.rows_per_scale = 1
        self.scale_RC: Tensor | None = None
        self.input_scale: Tensor | None = None
        self._product: fp8_gemm.Weight | None = None
        self._library_takes = False
        self._num_sms = 0
        self._scales = [self._empty_scale(rows) for _, rows in parts]
        self._input_scales = [torch.empty((), dtype=torch.float32, device="cpu") for _ in parts]

    def _empty_scale(self, rows: int) -> Tensor:
        blocks = (-(-rows // FP8_BLOCK), -(-self.in_features // FP8_BLOCK))
        shapes = {Granularity.TENSOR: (), Granularity.CHANNEL: (rows, 1), Granularity.BLOCK: blocks}
        return torch.empty(shapes[self.config.weights], dtype=torch.float32, device="cpu")

    def checkpoint_scales(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Yields (part's name in the checkpoint; memory of the weight's scales; memory of the input's scale)."""
        for (part, _), scale, input_scale in zip(self.parts, self._scales, self._input_scales, strict=True):
            yield part, scale, input_scale if self.config.static_inputs else None

    def finish(self) -> None:
        """Turns the parts' filled scales into the form that products need."""
        device = self.weight.device
        sizes = [rows for _, rows in self.parts]
        # Parts begin at sums of sizes. A divisor of all these and of a block never spans rows of two scales.
        shared = math.gcd(FP8_BLOCK, *sizes[:-1]) if self.config.weights is Granularity.BLOCK else 1
        self.rows_per_scale = shared
        self.scale_RC = torch.cat([self._rows_of_scales(*each) for each in zip(sizes, self._scales, strict=True)])
        self.scale_RC = self.scale_RC.to(device)
        if self.config.static_inputs:
            # All parts read one input, so calibration saw the same numbers for each; the largest scale fits them all.
            self.input_scale = torch.stack(self._input_scales).amax().to(device)
        self._scales, self._input_scales = [], []
        if multiplies_fp8(device) and self.in_features % fp8_gemm.ALIGNMENT == 0:
            arrived = torch.zeros(fp8_gemm.num_counters(self.out_features), dtype=torch.int32, device=device)
            self._product = fp8_gemm.Weight(self.weight.data, self.scale_RC, shared, self.bias, arrived)
            self._library_takes = fp8_library.takes(self._product, self.dtype)
            if has_hopper_kernels(device, few_tokens.HOPPER):
                self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count

    def _rows_of_scales(self, rows: int, scale: Tensor) -> Tensor:
        if self.config.weights is Granularity.TENSOR:
            return scale.expand(rows, 1)
        if self.config.weights is Granularity.CHANNEL:
            return scale
        repeated = scale.repeat_interleave(FP8_BLOCK // self.rows_per_scale, dim=0)
        return repeated[: -(-rows // self.rows_per_scale)]

    def dequantize_(self) -> None:
        """Becomes a layer in the model's dtype, for code that reads its weights other than by products."""
        self.weight = nn.Parameter(self.dequantized(self.dtype), requires_grad=False)
        self.scale_RC = self.input_scale = self._product = None

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        assert self.scale_RC is not None, "finish was not called"
        return fp8.dequantize_rows(self.weight, self.scale_RC, rows_per_scale=self.rows_per_scale, dtype=dtype)

    def row_format(self, num_tokens: int) -> RowFormat | None:
        """Returns None where tensors are needed: by adapters, by dequantized weights, and where the batch must not
        matter."""
        if self._product is None or self.has_adapters or self.batch_invariant:
            return None
        return self._row_format(num_tokens, self._product)

    def _row_format(self, num_tokens: int, weight: fp8_gemm.Weight) -> RowFormat:
        power_of_two = self.config.power_of_two_inputs
        if self.config.weights is Granularity.BLOCK:
            multiple_of = fp8_library.TOKENS if self._uses_library(num_tokens, weight) else 1
            return RowFormat(fp8.E4M3, blocked=True, power_of_two=power_of_two, multiple_of=multiple_of)
        return RowFormat(fp8.E4M3, power_of_two=power_of_two, scale=self.input_scale)

    def forward(self, input: Tensor | QuantizedRows) -> Tensor:
        if isinstance(input, QuantizedRows):
            assert self._product is not None, "row_format has said so"
            return self._multiply(input, self._product)
        if self.scale_RC is None:
            out: Tensor = super().forward(input)
            return out
        if self._product is None:
            return self.multiply(input, self.dequantized(input.dtype), self.bias)
        x_TK = input.flatten(0, -2)
        x_TK = x_TK if x_TK.stride(-1) == 1 else x_TK.contiguous()
        rows = quantize(x_TK, self._row_format(len(x_TK), self._product))
        return self._multiply(rows, self._product).view(*input.shape[:-1], self.out_features)

    def _multiply(self, rows: QuantizedRows, weight: fp8_gemm.Weight) -> Tensor:
        tile = self._decode_tile(rows.num_tokens, weight)
        if tile is not None:
            return few_tokens.multiply(rows.stored_PK, rows.scale_PC, weight, dtype=rows.dtype, tile=tile)
        if self._uses_library(rows.num_tokens, weight):
            out_PN = fp8_library.multiply(rows.stored_PK, rows.scale_PC, weight, dtype=rows.dtype)
            return out_PN[: rows.num_tokens]
        return fp8_gemm.multiply(
            rows.stored_PK, rows.scale_PC, weight, dtype=rows.dtype, batch_invariant=self.batch_invariant
        )

    def _uses_library(self, num_tokens: int, weight: fp8_gemm.Weight) -> bool:
        """Whether the library multiplies this number of tokens."""
        if self.batch_invariant or self._decode_tile(num_tokens, weight) is not None:
            return False
        return self._library_takes and fp8_library.is_faster(num_tokens, weight)

    def _decode_tile(self, num_tokens: int, weight: fp8_gemm.Weight) -> few_tokens.DecodeTile | None:
        """The tile of the kernel for few tokens; None where another one multiplies this number."""
        if self.batch_invariant or not self._num_sms:
            return None
        return few_tokens.choose(num_tokens, weight, self._num_sms)


def multiplies_fp8(device: torch.device) -> bool:
    """Whether the device's tensor cores take e4m3 and its multiprocessors hold our tiles: Hopper and data-center
    Blackwell. Ada's multiprocessors have less shared memory."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
