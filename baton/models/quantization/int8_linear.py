"""Linear layers whose weights stay in int8.

On a GPU, activations are rounded to int8 as the checkpoint says: one scale for each token, or one from the checkpoint
for all. Elsewhere weights are dequantized to the activations' dtype, and activations are not rounded.

Legend: T token, N output channel, K input channel.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from baton.models.config.quantization.int8_config import Int8Config
from baton.models.kernels.quantized import few_tokens, int8_gemm
from baton.models.kernels.quantized.fp8_gemm import ALIGNMENT, Weight
from baton.models.kernels.quantized.rows import QuantizedRows, RowFormat, quantize
from baton.models.layers.linear import FusedLinear, Linear
from baton.tritonlib.hopper_check import has_hopper_kernels


class Int8Linear(FusedLinear):
    """An int8 linear layer: one of a checkpoint's layers, or several fused.

    Args:
        replaced: the layer in the model's dtype. Its bias is kept, its weight is not read.
        name: the checkpoint's name of a single layer; the parts of a fused one have names of their own.

    Attributes:
        batch_invariant: where weights are dequantized, `multiply` ensures it; sums of integers always are.
        scale_N: of the weight's rows; None until `finish`, and after `dequantize_`.
    """

    def __init__(self, replaced: Linear, name: str, config: Int8Config, *, device: torch.device | str) -> None:
        parts = replaced.parts if isinstance(replaced, FusedLinear) else ((name, replaced.out_features),)
        with torch.device("meta"):
            super().__init__(replaced.in_features, parts, dtype=replaced.weight.dtype, bias=False)
        stored = torch.empty(self.weight.shape, dtype=torch.int8, device=device)
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.bias = replaced.bias
        self.dtype = replaced.weight.dtype
        self.config = config
        self.batch_invariant = False
        self.scale_N: Tensor | None = None
        self.input_scale: Tensor | None = None
        self._arrived: Tensor | None = None
        self._num_sms = 1
        self._few: Weight | None = None
        shapes = [(rows, 1) if config.by_channel else () for _, rows in parts]
        self._scales = [torch.empty(shape, dtype=torch.float32, device="cpu") for shape in shapes]
        self._input_scales = [torch.empty((), dtype=torch.float32, device="cpu") for _ in parts]

    def checkpoint_scales(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Yields (part's name in the checkpoint; memory of the weight's scales; memory of the input's scale)."""
        for (part, _), scale, input_scale in zip(self.parts, self._scales, self._input_scales, strict=True):
            yield part, scale, input_scale if self.config.static_inputs else None

    def finish(self) -> None:
        """Turns the parts' filled scales into the form that products need."""
        device = self.weight.device
        rows = [scale.expand(rows, 1) for (_, rows), scale in zip(self.parts, self._scales, strict=True)]
        self.scale_N = torch.cat(rows).flatten().to(device)
        if self.config.static_inputs:
            # All parts read one input, so calibration saw the same numbers for each; the largest scale fits them all.
            self.input_scale = torch.stack(self._input_scales).amax().to(device)
        self._scales, self._input_scales = [], []
        if device.type == "cuda":
            self._arrived = torch.zeros(int8_gemm.num_counters(self.out_features), dtype=torch.int32, device=device)
            self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
            if has_hopper_kernels(device, few_tokens.HOPPER) and self.in_features % ALIGNMENT == 0:
                self._few = Weight(self.weight.data, self.scale_N[:, None], 1, self.bias, self._arrived)

    def dequantize_(self) -> None:
        """Becomes a layer in the model's dtype, for code that reads its weights other than by products."""
        self.weight = nn.Parameter(self.dequantized(self.dtype), requires_grad=False)
        self.scale_N = self.input_scale = self._arrived = self._few = None

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        assert self.scale_N is not None, "finish was not called"
        return (self.weight.float() * self.scale_N[:, None]).to(dtype)

    def row_format(self, num_tokens: int) -> RowFormat | None:  # noqa: ARG002 (the same for all)
        """Returns None where tensors are needed: by adapters, by dequantized weights, and where the batch must not
        matter."""
        if self._arrived is None or self.has_adapters or self.batch_invariant:
            return None
        return RowFormat(torch.int8, scale=self.input_scale)

    def forward(self, input: Tensor | QuantizedRows) -> Tensor:
        if isinstance(input, QuantizedRows):
            return self._multiply(input)
        if self.scale_N is None:
            out: Tensor = super().forward(input)
            return out
        if self._arrived is None:
            return self.multiply(input, self.dequantized(input.dtype), self.bias)
        x_TK = input.flatten(0, -2)
        x_TK = x_TK if x_TK.stride(-1) == 1 else x_TK.contiguous()
        rows = quantize(x_TK, RowFormat(torch.int8, scale=self.input_scale))
        return self._multiply(rows).view(*input.shape[:-1], self.out_features)

    def _multiply(self, rows: QuantizedRows) -> Tensor:
        assert self.scale_N is not None, "finish was not called"
        assert self._arrived is not None, "there is no kernel on this device"
        if self._few is not None and not self.batch_invariant:
            tile = few_tokens.choose(rows.num_tokens, self._few, self._num_sms)
            if tile is not None:
                return few_tokens.multiply(rows.stored_PK, rows.scale_PC, self._few, dtype=rows.dtype, tile=tile)
        return int8_gemm.multiply(
            rows.stored_PK,
            rows.scale_PC,
            self.weight,
            self.scale_N,
            self.bias,
            self._arrived,
            dtype=rows.dtype,
            num_sms=self._num_sms,
        )
