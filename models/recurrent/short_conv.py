"""STUB until branch states."""
import torch
from torch import Tensor
from models.recurrent.rows import StateRows


def short_conv(x_TX: Tensor, weight_XW: Tensor, bias_X: Tensor | None, conv_SHXW: Tensor, rows: StateRows, activation: str | None) -> Tensor:
    out = torch.zeros_like(x_TX)
    H = conv_SHXW.shape[1]
    W = weight_XW.shape[1]

    def one(slot, start, stop, fresh):
        before = conv_SHXW[slot].flatten(0, 1).mT  # [W-1, X]
        if fresh:
            before = torch.zeros_like(before)
        x = torch.cat([before, x_TX[start:stop].float()])
        y = sum(x[w : w + stop - start] * weight_XW[:, w].float() for w in range(W))
        if bias_X is not None:
            y = y + bias_X.float()
        if activation == "silu":
            y = torch.nn.functional.silu(y)
        out[start:stop] = y.to(out.dtype)
        conv_SHXW[slot] = x[-(W - 1) :].mT.unflatten(0, (H, -1))

    for i, (slot, length) in enumerate(zip(rows.decode_slots_N.tolist(), rows.decode_lens_N.tolist())):
        if length > 0:
            one(slot, i, i + 1, length == 1)
    starts = rows.prompt_starts_P1.tolist()
    for p, (slot, context) in enumerate(zip(rows.prompt_slots_P.tolist(), rows.prompt_context_P.tolist())):
        if slot >= 0 and starts[p + 1] > starts[p]:
            one(slot, starts[p], starts[p + 1], context == 0)
    return out
