"""The scales of an fp8 cache: a stored number times its scale is the key or value that it stands for.

Per tensor, as checkpoints have them; given with the weights, or calculated once from the first batch.
"""

import torch
from torch import Tensor, nn

# A calculated scale maps the first batch's largest number to this, well below fp8's largest (448): later batches may
# hold larger ones.
Q_RANGE = 200.0
K_RANGE = 200.0
V_RANGE = 100.0


class KVScales(nn.Module):
    """Attributes:
    q_scale, k_scale, v_scale: float32 scalars on the device of the layer.
    calculate: the next batch sets them; turns itself off.
    """

    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor

    def __init__(
        self, *, q_scale: float = 1.0, k_scale: float = 1.0, v_scale: float = 1.0, calculate: bool = False
    ) -> None:
        super().__init__()
        self.calculate = calculate
        for name, value in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float32), persistent=False)

    def calc_kv_scales(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Sets the scales from what one batch holds; only once."""
        for scale, values, wanted in (
            (self.q_scale, q, Q_RANGE),
            (self.k_scale, k, K_RANGE),
            (self.v_scale, v, V_RANGE),
        ):
            scale.copy_(values.abs().amax().float() / wanted)
        self.calculate = False
