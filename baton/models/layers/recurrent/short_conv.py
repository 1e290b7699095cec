"""Causal depthwise convolution over a few tokens. Its state is the last width - 1 inputs of each channel.

A channel's sum has the same order everywhere, so a token's result has the same bits in any cut of its sequence.
Shapes: T token, X channel, W tap of the filter, S slot, H head, C channel of a head, R request, Z state to
write.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from baton.models.kernels.recurrent.short_conv import short_conv as short_conv_on_gpu
from baton.models.kernels.recurrent.state_rows import StateRows, continued
from baton.models.layers.elementwise import silu

Activation: TypeAlias = Literal["silu"] | None


class DepthwiseWeights(nn.Module):
    """The weights of a depthwise convolution, in checkpoints' layout."""

    def __init__(self, channels: int, width: int, *, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, dtype=dtype)) if bias else None


def short_conv(
    x_THC: Tensor,
    weight_XW: Tensor,
    bias_X: Tensor | None,
    state_SHCW: Tensor,
    rows: StateRows,
    *,
    activation: Activation = None,
) -> Tensor:
    """Returns [T, X], for each token the sum of its channel's last W inputs times the weights, in float32, rounded
    once. Tokens of no request get finite but undefined values.

    Args:
        x_THC: the inputs; X = H * C in this order. Tokens and heads at any strides.
        weight_XW: the last tap is that of the token itself.
        state_SHCW: [S, H, C, W - 1] float32, at any strides, oldest input first. The inputs before a request's first
            token come from it, and the last ones of each request are written to it.
    """
    if x_THC.is_cuda:
        return short_conv_on_gpu(x_THC, weight_XW, bias_X, state_SHCW, rows, silu=activation == "silu")
    return short_conv_in_torch(x_THC, weight_XW, bias_X, state_SHCW, rows, activation=activation)


def short_conv_in_torch(
    x_THC: Tensor,
    weight_XW: Tensor,
    bias_X: Tensor | None,
    state_SHCW: Tensor,
    rows: StateRows,
    *,
    activation: Activation = None,
) -> Tensor:
    """`short_conv` on any device; waits for one only if decodes continue others."""
    num_tokens, num_channels = len(x_THC), len(weight_XW)
    past = weight_XW.shape[1] - 1
    requests = _Requests(rows, num_tokens)
    before_RXW = state_SHCW[requests.slots_R.clamp(min=0)].reshape(-1, num_channels, past)
    before_RXW = before_RXW.masked_fill(requests.fresh_R[:, None, None], 0.0)
    inputs_TX = x_THC.flatten(1).float()
    # NOTE: the first rows are those before each request, so that one index reaches both kinds of inputs.
    before_and_x = torch.cat([before_RXW.transpose(1, 2).reshape(-1, num_channels), inputs_TX])
    first_x = len(before_and_x) - num_tokens

    def source(request: Tensor, token: Tensor) -> Tensor:
        """Where the input of this token of the request is; `token` counts from its first new one."""
        index = torch.where(token < 0, request * past + past + token, first_x + requests.starts_R[request] + token)
        return index.clamp(max=len(before_and_x) - 1)  # of tokens and requests that are none

    weight_WX = weight_XW.float().t()
    out_TX = torch.zeros_like(inputs_TX) if bias_X is None else bias_X.float().expand_as(inputs_TX)
    for tap in range(past + 1):
        index_T = source(requests.request_T, requests.token_T - past + tap)
        out_TX = out_TX + before_and_x[index_T] * weight_WX[tap]
    _write(state_SHCW, requests, before_and_x, source)
    if activation == "silu":
        out_TX = silu(out_TX)
    out_TX = out_TX.to(x_THC.dtype)
    for each in continued(rows):
        state_SHCW[each.after] = state_SHCW[each.before]
        given = x_THC[each.places], weight_XW, bias_X, state_SHCW
        out_TX[each.places] = short_conv_in_torch(*given, each.rows, activation=activation)
    return out_TX


class _Requests:
    """A step's requests, decodes and prompts alike.

    Attributes:
        slots_R: -1 for padding.
        starts_R, lens_R: their tokens; 0 tokens for padding.
        fresh_R: whether the state before is zero.
        written_slots_Z, written_lens_Z, written_request_Z: the states to write: those of all requests, then snapshots.
        request_T, token_T: of each token, its request and its place in it; any valid ones for tokens of no request.
    """

    def __init__(self, rows: StateRows, num_tokens: int) -> None:
        num_decodes, device = len(rows.decode_slots_N), rows.decode_slots_N.device
        decodes_N = torch.arange(num_decodes, device=device)
        is_decode_N = rows.decode_lens_N > 0
        starts_P1 = rows.prompt_starts_P1.long()
        self.slots_R = torch.cat([torch.where(is_decode_N, rows.decode_slots_N, -1), rows.prompt_slots_P]).long()
        self.starts_R = torch.cat([decodes_N, starts_P1[:-1]])
        self.lens_R = torch.cat([is_decode_N.long(), starts_P1.diff()])
        self.fresh_R = torch.cat([rows.decode_lens_N <= 1, rows.prompt_context_P == 0])
        requests_R = torch.arange(len(self.slots_R), device=device)
        snapshots_P1 = requests_R[num_decodes:, None]
        self.written_slots_Z = torch.cat([self.slots_R, rows.snapshot_slots_PM.flatten()])
        self.written_lens_Z = torch.cat([self.lens_R, rows.snapshot_lens_PM.flatten()])
        self.written_request_Z = torch.cat([requests_R, snapshots_P1.expand_as(rows.snapshot_slots_PM).flatten()])
        tokens_T = torch.arange(num_tokens, device=device)
        request_T = torch.searchsorted(starts_P1[1:].contiguous(), tokens_T, right=True) + num_decodes
        request_T = request_T.clamp(max=len(self.slots_R) - 1)
        decode_tokens = min(num_decodes, num_tokens)
        request_T[:decode_tokens] = torch.where(
            is_decode_N[:decode_tokens], decodes_N[:decode_tokens], request_T[:decode_tokens]
        )
        self.request_T = request_T
        self.token_T = (tokens_T - self.starts_R[request_T]).clamp(min=0)


def _write(
    state_SHCW: Tensor, requests: _Requests, before_and_x: Tensor, source: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Keeps the last inputs of each request, and those of its snapshots."""
    past = state_SHCW.shape[-1]
    slots_Z, lens_Z, request_Z = requests.written_slots_Z, requests.written_lens_Z, requests.written_request_Z
    is_one_Z = (slots_Z >= 0) & (lens_Z > 0)
    # NOTE: rows of padding write what the first request writes, or what is there if there is no request at all: a
    # sync-free write cannot leave rows out.
    writer_Z = torch.where(is_one_Z, torch.arange(len(is_one_Z), device=is_one_Z.device), is_one_Z.int().argmax())
    slots_Z = slots_Z[writer_Z].clamp(min=0)
    last_ZW = torch.arange(-past, 0, device=is_one_Z.device) + lens_Z[writer_Z, None]
    values_ZXW = before_and_x[source(request_Z[writer_Z, None], last_ZW)].transpose(1, 2)
    values_ZHCW = values_ZXW.reshape(-1, *state_SHCW.shape[1:])
    state_SHCW[slots_Z] = torch.where(is_one_Z.any(), values_ZHCW, state_SHCW[slots_Z])
