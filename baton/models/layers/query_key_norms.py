"""Norms of queries and keys, between their projection and their rotation or after it.

Shapes: T token, X channels of all heads of queries or keys, H head, C head channel.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from baton.models.config.model_config import GQAConfig, QKNorm
from baton.models.kernels.row_squares import mean_squares
from baton.models.layers.norms import RMSNorm
from baton.models.layers.parallel import TensorParallel


def norm_rows(q_TX: Tensor, k_TX: Tensor, q_norm: RMSNorm, k_norm: RMSNorm, parallel: TensorParallel) -> None:
    """Norms each token's queries of all heads together, and its keys likewise, by RMS norms in place.

    With several ranks these are the heads of all ranks. All have equal numbers of them, and a kv head that several
    ranks hold counts as often for each, so the mean over the whole row is the mean of the ranks' means.
    """
    if parallel.size == 1:
        q_TX.copy_(q_norm(q_TX))
        k_TX.copy_(k_norm(k_TX))
        return
    q_float_TX, k_float_TX = q_TX.float(), k_TX.float()
    squares = torch.stack((mean_squares(q_TX), mean_squares(k_TX)))
    q_mean_T, k_mean_T = parallel.all_reduce(squares).div_(parallel.size).unsqueeze(-1).unbind()
    q_TX.copy_(q_float_TX * torch.rsqrt(q_mean_T + q_norm.eps) * q_norm.weight)
    k_TX.copy_(k_float_TX * torch.rsqrt(k_mean_T + k_norm.eps) * k_norm.weight)


class OwnWeightsNorm(nn.Module):
    """A layer norm without bias of each head, with weights for each: in float32, rounded once."""

    def __init__(self, num_heads: int, head_dim: int, *, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, dtype=dtype))
        self.eps = eps

    def forward(self, x_TX: Tensor) -> Tensor:
        x_THC = x_TX.unflatten(-1, self.weight.shape).float()
        normed_THC = layer_norm(x_THC, x_THC.shape[-1:], eps=self.eps) * self.weight
        return normed_THC.to(x_TX.dtype).flatten(1)


def make_norms(
    gqa: GQAConfig, norm: type[RMSNorm], *, eps: float, dtype: torch.dtype
) -> tuple[RMSNorm | OwnWeightsNorm | None, RMSNorm | OwnWeightsNorm | None]:
    """Returns the norms of queries and of keys; both may be None.

    Args:
        norm: class of the norms, except for OWN_WEIGHTS.
    """
    if not gqa.qk_norm:
        return None, None
    q_heads, k_heads, dim = gqa.num_heads, gqa.num_kv_heads, gqa.head_dim
    match gqa.qk_norm_of:
        case QKNorm.ROW:
            return norm(q_heads * dim, eps=eps, dtype=dtype), norm(k_heads * dim, eps=eps, dtype=dtype)
        case QKNorm.OWN_WEIGHTS:
            return (
                OwnWeightsNorm(q_heads, dim, eps=eps, dtype=dtype),
                OwnWeightsNorm(k_heads, dim, eps=eps, dtype=dtype),
            )
    return norm(dim, eps=eps, dtype=dtype), norm(dim, eps=eps, dtype=dtype)
