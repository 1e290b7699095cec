"""The scales of an fp8 cache: a stored number times its scale is the key or value.

There is one scale per tensor, as in checkpoints, given with the weights or calculated once from the first batch.
"""

import torch
from torch import Tensor, nn

from baton.core.errors import InternalError

# A calculated scale maps the first batch's largest number to this, well below fp8's largest (448): later batches may
# hold larger ones.
Q_SCALE_CONSTANT = 200.0
K_SCALE_CONSTANT = 200.0
V_SCALE_CONSTANT = 100.0


class KVScales(nn.Module):
    """The scales of one layer's fp8 cache.

    Attributes:
        q_scale, k_scale, v_scale: float32 scalars on the device of the layer.
        prob_scale: scale of softmax weights in fp8, which some checkpoints have. It changes no result: every backend
            multiplies weights in 16 or 32 bits, which need no scale.
        calculate: the next batch sets the scales and resets this to False. Two nodes calculate different scales, so KV
            that travels between nodes needs given scales.
    """

    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor
    prob_scale: Tensor

    def __init__(
        self,
        *,
        q_scale: float = 1.0,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        prob_scale: float = 1.0,
        calculate: bool = False,
    ) -> None:
        super().__init__()
        self.calculate = calculate
        given = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale, "prob_scale": prob_scale}
        for name, value in given.items():
            self.register_buffer(name, torch.tensor(value, dtype=torch.float32), persistent=False)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The scales of queries, keys and values."""
        return self.q_scale, self.k_scale, self.v_scale

    def calc_kv_scales(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Sets the scales from one batch, once, without waiting for the device. A batch of zeros, such as a warm-up's,
        gives scale 1.

        Raises:
            InternalError: a CUDA graph is captured, which would calculate them at every replay.
        """
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise InternalError(
                "a layer would calculate its scales in a CUDA graph, at every replay",
                field="scales",
                cure="give the scales with the weights, or compute one batch before the graph is captured",
            )
        for scale, values, wanted in (
            (self.q_scale, q, Q_SCALE_CONSTANT),
            (self.k_scale, k, K_SCALE_CONSTANT),
            (self.v_scale, v, V_SCALE_CONSTANT),
        ):
            largest = values.abs().amax().float()
            scale.copy_(torch.where(largest > 0, largest / wanted, 1.0))
        self.calculate = False

    def extra_repr(self) -> str:
        return f"calculate={self.calculate}"
