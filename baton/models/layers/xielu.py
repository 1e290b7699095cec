"""The MLP of Apertus: two products with xIELU (arXiv 2411.13010) in between, and no gate.

Shapes: T token, D hidden channel, I intermediate channel.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from baton.models.layers.linear import Linear


class Xielu(nn.Module):
    """alpha_p x ** 2 + beta x above 0, and alpha_n (exp(min(x, eps)) - 1 - x) + beta x below, in float32, rounded once.

    The two alphas are a softplus of what is stored; beta is added to the second.
    """

    def __init__(self, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1, dtype=dtype))
        self.alpha_n = nn.Parameter(torch.empty(1, dtype=dtype))
        self.beta = nn.Parameter(torch.empty((), dtype=dtype))
        self.eps = nn.Parameter(torch.empty((), dtype=dtype))

    def forward(self, x_TI: Tensor) -> Tensor:
        x, beta, eps = x_TI.float(), self.beta.float(), self.eps.float()
        above = softplus(self.alpha_p.float()) * x * x
        below = (beta + softplus(self.alpha_n.float())) * (torch.expm1(torch.minimum(x, eps)) - x)
        return (torch.where(x > 0, above, below) + beta * x).to(x_TI.dtype)


class XieluMLP(nn.Module):
    def __init__(self, size: int, intermediate_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.up_proj = Linear(size, intermediate_size, dtype=dtype)
        self.down_proj = Linear(intermediate_size, size, dtype=dtype)
        self.act_fn = Xielu(dtype=dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        out_TD: Tensor = self.down_proj(self.act_fn(self.up_proj(x_TD)))
        return out_TD
