"""The weights of a layer's experts as its products read them. Legend: E expert, N output channel, C input channel."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ExpertWeights:
    """One of the two layers of all experts.

    Attributes:
        weights_ENC: either of the last axes may be the contiguous one.
        bias_EN: in the model's dtype, contiguous.
        scales: float32 [E, rows, columns], contiguous, where the weights are fp8: a weight is number * scale. One row
            covers all of N (of gate and up: of each half) or 128 channels of it; one column, all of C or 128.
        power_of_two_inputs: inputs that are rounded to fp8 have powers of two as scales.
    """

    weights_ENC: Tensor
    bias_EN: Tensor | None = None
    scales: Tensor | None = None
    power_of_two_inputs: bool = False

    @property
    def inputs_first(self) -> bool:
        """Whether weights lie in memory as [E, C, N]."""
        return self.weights_ENC.stride(2) != 1
