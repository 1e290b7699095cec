"""The state-space scan of Mamba-2 (arXiv 2405.21060): each head's state fades at a token's rate and takes up its input.

    state = exp(-dt * rate) * state + dt * x (outer) B;    y = state . C + skip * x

Decodes and prompts in order take the recurrence. Other prompts are computed in sub-chunks of 64 tokens at multiples of
64 of their positions, so a prompt that is cut there has the same bits as a whole one.
Shapes: T token, S slot, H head, G group of heads that share B and C, P channel of a head, N number of the state of one
channel, R request, K head of a group, I, J token of a sub-chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.models.kernels.recurrent import selective_scan as kernels
from baton.models.kernels.recurrent.selective_scan_chunks import SUB_CHUNK
from baton.models.kernels.recurrent.shared_inputs import share_inputs as share_inputs_on_gpu
from baton.models.kernels.recurrent.state_rows import StateRows, continued, one_by_one, prompts_of
from baton.models.layers.elementwise import softplus


@dataclass(frozen=True)
class ScanWeights:
    """The learnt weights of a layer, in float32.

    Attributes:
        log_rate_H: the state fades by exp(-dt * exp(log_rate)).
        skip_H: factor of a token's own input in its output.
        dt_bias_H: added to dt before its softplus.
        dt_min, dt_max: limits of dt after its softplus.
    """

    log_rate_H: Tensor
    skip_H: Tensor
    dt_bias_H: Tensor
    dt_min: float
    dt_max: float


def selective_scan(
    x_THP: Tensor,
    dt_TH: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    weights: ScanWeights,
    states_SHPN: Tensor,
    rows: StateRows,
) -> Tensor:
    """Returns y [T, H, P], computed in float32 and rounded once. Tokens of no request get finite but undefined values.

    Args:
        x_THP, b_TGN, c_TGN: any strides over tokens, the other axes side by side. Heads h of group h * G // H.
        dt_TH: before bias, softplus and limits; any stride over tokens.
        states_SHPN: float32, at any strides, N side by side; those of the step's requests are changed.
    """
    if x_THP.is_cuda:
        return kernels.selective_scan(
            x_THP,
            dt_TH,
            b_TGN,
            c_TGN,
            (weights.log_rate_H, weights.skip_H, weights.dt_bias_H),
            (weights.dt_min, weights.dt_max),
            states_SHPN,
            rows,
        )
    return selective_scan_in_torch(x_THP, dt_TH, b_TGN, c_TGN, weights, states_SHPN, rows)


def selective_scan_in_torch(
    x_THP: Tensor,
    dt_TH: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    weights: ScanWeights,
    states_SHPN: Tensor,
    rows: StateRows,
) -> Tensor:
    """`selective_scan` on any device; decodes wait for it only if some continue others."""
    x, per_group = x_THP.float(), x_THP.shape[1] // b_TGN.shape[1]
    b_THN, c_THN = (each.float().repeat_interleave(per_group, dim=1) for each in (b_TGN, c_TGN))
    dt = softplus(dt_TH.float() + weights.dt_bias_H).clamp(weights.dt_min, weights.dt_max)

    def of(part: slice) -> _Tokens:
        return _Tokens(x[part], dt[part], b_THN[part], c_THN[part])

    decay_H = -weights.log_rate_H.exp()
    out_THP = x * weights.skip_H[:, None]
    num_decodes = min(len(rows.decode_slots_N), len(x))
    if num_decodes:
        decodes = slice(0, num_decodes)
        out_THP[decodes] += _decode(of(decodes), decay_H, states_SHPN, rows)
    if len(rows.prompt_slots_P):
        for slot, context, start, stop, snapshots in prompts_of(rows):
            state_HPN = states_SHPN[slot].clone() if context else torch.zeros_like(states_SHPN[slot])
            for piece in one_by_one(start, stop) if rows.in_order else sub_chunks(start, stop, context):
                y_IHP, state_HPN = (_one if rows.in_order else _sub_chunk)(of(piece), decay_H, state_HPN)
                out_THP[piece] += y_IHP
                if piece.stop in snapshots:
                    states_SHPN[snapshots[piece.stop]] = state_HPN
            states_SHPN[slot] = state_HPN
    out_THP = out_THP.to(x_THP.dtype)
    for each in continued(rows):
        states_SHPN[each.after] = states_SHPN[each.before]
        x, dt, b, c = (tensor[each.places] for tensor in (x_THP, dt_TH, b_TGN, c_TGN))
        out_THP[each.places] = selective_scan_in_torch(x, dt, b, c, weights, states_SHPN, each.rows)
    return out_THP


def share_inputs(conv_SHXW: Tensor, rows: StateRows, *, num_groups: int) -> None:
    """Copies what the first head of each group keeps to the group's other heads, for the requests of the step, so that
    ranks may split the state between any two heads.

    Args:
        conv_SHXW: X channels that a group shares: at any strides, changed.
    """
    if num_groups == conv_SHXW.shape[1]:
        return
    if conv_SHXW.is_cuda:
        share_inputs_on_gpu(conv_SHXW, rows, num_groups=num_groups)
        return
    share_inputs_in_torch(conv_SHXW, rows, num_groups=num_groups)


def share_inputs_in_torch(conv_SHXW: Tensor, rows: StateRows, *, num_groups: int) -> None:
    """`share_inputs` on any device; never waits for it."""
    is_decode_N = rows.decode_lens_N > 0
    written_N = torch.where(rows.decode_slots_N < -1, -2 - rows.decode_slots_N, rows.decode_slots_N)
    decode_slots_N = torch.where(is_decode_N, written_N, -1)
    slots_R = torch.cat([decode_slots_N, rows.prompt_slots_P, rows.snapshot_slots_PM.flatten()]).long()
    # Rows of padding repeat the first request; a step of padding alone leaves a slot's numbers as they are.
    is_one_R = slots_R >= 0
    row_R = torch.where(is_one_R, torch.arange(len(slots_R), device=slots_R.device), is_one_R.int().argmax())
    slots_R = slots_R[row_R].clamp(min=0)
    held_RHXW = conv_SHXW[slots_R]
    held_RGKXW = held_RHXW.unflatten(1, (num_groups, -1))
    shared_RHXW = held_RGKXW[:, :, :1].expand_as(held_RGKXW).flatten(1, 2)
    conv_SHXW[slots_R] = torch.where(is_one_R.any(), shared_RHXW, held_RHXW)


def sub_chunks(start: int, stop: int, context: int) -> Iterator[slice]:
    """The tokens start..stop of a prompt with `context` earlier ones, cut at multiples of SUB_CHUNK of its tokens."""
    while start < stop:
        end = min(stop, start + SUB_CHUNK - context % SUB_CHUNK)
        yield slice(start, end)
        start, context = end, context + end - start


@dataclass(frozen=True)
class _Tokens:
    """float32; dt is the step in time, within its limits."""

    x_THP: Tensor
    dt_TH: Tensor
    b_THN: Tensor
    c_THN: Tensor


def _decode(tokens: _Tokens, decay_H: Tensor, states_SHPN: Tensor, rows: StateRows) -> Tensor:
    """Computes one token of each decode. Rows of padding repeat the first decode, so every slot is written with one
    value."""
    num_rows = len(tokens.dt_TH)
    lens_R, slots_R = rows.decode_lens_N[:num_rows], rows.decode_slots_N[:num_rows]
    is_decode_R = (lens_R > 0) & (slots_R >= 0)
    row_R = torch.where(is_decode_R, torch.arange(len(lens_R), device=lens_R.device), is_decode_R.int().argmax())
    slots_R = slots_R[row_R].clamp(min=0).long()
    stored = states_SHPN[slots_R]
    state = stored.masked_fill((lens_R[row_R] <= 1)[:, None, None, None], 0.0)
    chosen = _Tokens(tokens.x_THP[row_R], tokens.dt_TH[row_R], tokens.b_THN[row_R], tokens.c_THN[row_R])
    y_RHP, state = _recur(chosen, decay_H, state)
    states_SHPN[slots_R] = torch.where(is_decode_R.any(), state, stored)
    # Padding may stand where a prompt's tokens are, so it adds nothing.
    return y_RHP.masked_fill(~is_decode_R[:, None, None], 0.0)


def _recur(tokens: _Tokens, decay_H: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [R, H, P] without the skip of one token of each request, and the states after them."""
    dt_RH = tokens.dt_TH
    taken = (dt_RH[:, :, None] * tokens.x_THP).unsqueeze(-1) * tokens.b_THN.unsqueeze(2)
    state = state * (dt_RH * decay_H).exp()[:, :, None, None] + taken
    return (state * tokens.c_THN.unsqueeze(2)).sum(-1), state


def _one(token: _Tokens, decay_H: Tensor, state_HPN: Tensor) -> tuple[Tensor, Tensor]:
    """As `_sub_chunk`, of one token by the recurrence of decodes."""
    y_RHP, state_RHPN = _recur(token, decay_H, state_HPN.unsqueeze(0))
    return y_RHP, state_RHPN[0]


def _sub_chunk(tokens: _Tokens, decay_H: Tensor, state_HPN: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [I, H, P] without the skip, and the state after the tokens."""
    x_IHP, dt_IH, b_IHN, c_IHN = tokens.x_THP, tokens.dt_TH, tokens.b_THN, tokens.c_THN
    faded_HI = (dt_IH * decay_H).cumsum(0).t()
    taken_HIP = (x_IHP * dt_IH.unsqueeze(-1)).transpose(0, 1)
    b_HIN, c_HIN = b_IHN.transpose(0, 1), c_IHN.transpose(0, 1)
    later_IJ = torch.ones(len(x_IHP), len(x_IHP), dtype=torch.bool, device=x_IHP.device).triu(1)
    between_HIJ = (faded_HI.unsqueeze(2) - faded_HI.unsqueeze(1)).masked_fill(later_IJ, -torch.inf).exp()
    out_HIP = ((c_HIN @ b_HIN.mT) * between_HIJ) @ taken_HIP
    out_HIP = out_HIP + (c_HIN @ state_HPN.mT) * faded_HI.exp().unsqueeze(-1)
    left_HI1 = (faded_HI[:, -1:] - faded_HI).exp().unsqueeze(-1)
    state_HPN = state_HPN * faded_HI[:, -1, None, None].exp() + (taken_HIP * left_HI1).mT @ b_HIN
    return out_HIP.transpose(0, 1), state_HPN
