"""The gates of a delta rule, from the numbers that projections give: how much of a state stays, and how much of a
correction is made.

Shapes: T token, H key head, E entry of a head: a value head, or a channel of its key.
"""

from torch import Tensor

from baton.models.kernels.recurrent import delta_gates as kernels
from baton.models.layers.elementwise import sigmoid, softplus


def log_decays(a_THE: Tensor, log_rates: Tensor, bias_HE: Tensor) -> Tensor:
    """-exp(log_rates) * softplus(a + bias): [T, H, E] float32, contiguous.

    Args:
        a_THE: at any strides.
        log_rates: float32, [H, E] or [H, 1].
        bias_HE: float32.
    """
    if a_THE.is_cuda:
        return kernels.log_decays(a_THE, log_rates, bias_HE)
    return -log_rates.exp() * softplus(a_THE.float() + bias_HE)


def correction_rates(b_THR: Tensor) -> Tensor:
    """Sigmoids, float32, contiguous."""
    return kernels.sigmoids(b_THR) if b_THR.is_cuda else sigmoid(b_THR.float())
