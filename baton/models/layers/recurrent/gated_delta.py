"""The gated delta rule over a step's requests: each value head's state is a matrix S of keys by values, and each token
first lets it fade, then corrects what S answers to the token's key, then reads it.

    S = decay * S;  S += k (beta (v - S^T k))^T;  out = S^T q

(Gated DeltaNet, arXiv 2412.06464. Decays of Kimi delta attention, arXiv 2510.26692, differ by channel of the key.)
Plain torch, and the choice between it and the kernels. Decodes and prompts in order take the rule as it stands. Other
prompts are computed in sub-chunks at absolute positions, so the result has the same bits wherever a prompt is cut at
multiples of CHUNK.

Legend: T token, N decode, S slot, H key head, R value head of a key head, K key channel, V value channel, I, J token of
a sub-chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from baton.models.kernels.recurrent import gated_delta as kernels
from baton.models.kernels.recurrent.gated_delta_systems import CHUNK
from baton.models.kernels.recurrent.state_rows import StateRows, continued, one_by_one, prompts_of

_NORM_EPS = 1e-6


def gated_delta(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THRV: Tensor,
    log_decay: Tensor,
    beta_THR: Tensor,
    states_SHRKV: Tensor,
    rows: StateRows,
) -> Tensor:
    """Returns [T, H, R, V] in the dtype of the values, and updates the requests' states. Rows of padding are undefined.

    On a GPU the host never waits.

    Args:
        q_THK, k_THK: with a stride of 1 along channels; brought to unit length here, and queries scaled by K ** -0.5.
        v_THRV: with a stride of 1 along channels.
        log_decay: float32, at most 0; [T, H, R], or [T, H, R, K] where channels of a key fade at their own rates.
        beta_THR: float32.
        states_SHRKV: float32, at any strides.
    """
    if v_THRV.is_cuda:
        return kernels.gated_delta(q_THK, k_THK, v_THRV, log_decay, beta_THR, states_SHRKV, rows)
    return in_torch(q_THK, k_THK, v_THRV, log_decay, beta_THR, states_SHRKV, rows)


def in_torch(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THRV: Tensor,
    log_decay: Tensor,
    beta_THR: Tensor,
    states_SHRKV: Tensor,
    rows: StateRows,
) -> Tensor:
    """The twin of the kernels, on any device. Decodes need no host unless some continue others, so they can be captured
    in a CUDA graph."""
    tokens = _Tokens(
        (unit(q_THK.float()) * q_THK.shape[-1] ** -0.5).unsqueeze(2),
        unit(k_THK.float()).unsqueeze(2),
        v_THRV.float(),
        log_decay.unsqueeze(-1) if log_decay.dim() == 3 else log_decay,
        beta_THR,
    )
    out_THRV = torch.zeros_like(v_THRV, memory_format=torch.contiguous_format)
    num_decodes = min(len(rows.decode_slots_N), len(q_THK))
    if num_decodes:
        out_THRV[:num_decodes] = _decode(tokens, states_SHRKV, rows, num_rows=num_decodes).to(out_THRV.dtype)
    if len(rows.prompt_slots_P):
        for slot, context, start, stop, snapshots in prompts_of(rows):
            state_HRKV = states_SHRKV[slot].clone() if context else torch.zeros_like(states_SHRKV[slot])
            for piece in one_by_one(start, stop) if rows.in_order else sub_chunks(start, stop, context):
                part, state_HRKV = (_one if rows.in_order else _sub_chunk)(tokens.at(piece), state_HRKV)
                out_THRV[piece] = part.movedim(2, 0).to(out_THRV.dtype)
                if piece.stop in snapshots:
                    states_SHRKV[snapshots[piece.stop]] = state_HRKV
            states_SHRKV[slot] = state_HRKV
    for each in continued(rows):
        states_SHRKV[each.after] = states_SHRKV[each.before]
        q, k, v, decay, beta = (x[each.places] for x in (q_THK, k_THK, v_THRV, log_decay, beta_THR))
        out_THRV[each.places] = in_torch(q, k, v, decay, beta, states_SHRKV, each.rows)
    return out_THRV


def sub_chunks(start: int, stop: int, context: int) -> Iterator[slice]:
    """The tokens start..stop of a prompt, after `context` earlier ones, cut at multiples of CHUNK of its positions."""
    while start < stop:
        end = min(stop, start + CHUNK - context % CHUNK)
        yield slice(start, end)
        start, context = end, context + end - start


def unit(x: Tensor) -> Tensor:
    """Of length 1 along the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


@dataclass(frozen=True)
class _Tokens:
    """The rule's inputs of each token, in float32; X is K, or 1 if all channels of a key fade alike."""

    q_TH1K: Tensor
    k_TH1K: Tensor
    v_THRV: Tensor
    log_decay_THRX: Tensor
    beta_THR: Tensor

    def at(self, tokens: slice | Tensor) -> "_Tokens":
        return _Tokens(*(getattr(self, field.name)[tokens] for field in fields(self)))


def _decode(tokens: _Tokens, states_SHRKV: Tensor, rows: StateRows, *, num_rows: int) -> Tensor:
    """Computes one token of each decode. Rows of padding repeat the first decode, so every slot is written with one
    value."""
    lens_N, slots_N = rows.decode_lens_N[:num_rows], rows.decode_slots_N[:num_rows]
    is_decode_N = (lens_N > 0) & (slots_N >= 0)
    row_N = torch.where(is_decode_N, torch.arange(num_rows, device=lens_N.device), is_decode_N.int().argmax())
    tokens = tokens.at(row_N)
    slots_N = slots_N[row_N].clamp(min=0).long()
    stored_NHRKV = states_SHRKV[slots_N]
    state_NHRKV = stored_NHRKV.masked_fill(_by_request(lens_N[row_N] == 1), 0.0)
    out_NHRV, state_NHRKV = _rule(tokens, state_NHRKV)
    states_SHRKV[slots_N] = torch.where(_by_request(is_decode_N[row_N]), state_NHRKV, stored_NHRKV)
    return out_NHRV


def _rule(tokens: _Tokens, state_NHRKV: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [N, H, R, V] of one token of each request, and the states after them."""
    state_NHRKV = state_NHRKV * tokens.log_decay_THRX.exp().unsqueeze(-1)
    k_NH1K1 = tokens.k_TH1K.unsqueeze(-1)
    answer_NHRV = (state_NHRKV * k_NH1K1).sum(-2)
    correction_NHRV = (tokens.v_THRV - answer_NHRV) * tokens.beta_THR.unsqueeze(-1)
    state_NHRKV = state_NHRKV + k_NH1K1 * correction_NHRV.unsqueeze(-2)
    return (state_NHRKV * tokens.q_TH1K.unsqueeze(-1)).sum(-2), state_NHRKV


def _one(token: _Tokens, state_HRKV: Tensor) -> tuple[Tensor, Tensor]:
    """As `_sub_chunk`, of one token by the rule of decodes."""
    out_NHRV, state_NHRKV = _rule(token, state_HRKV.unsqueeze(0))
    return out_NHRV.movedim(0, 2), state_NHRKV[0]


def _by_request(mask_N: Tensor) -> Tensor:
    return mask_N[:, None, None, None, None]


def _sub_chunk(tokens: _Tokens, state_HRKV: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [H, R, I, V] and the state after some tokens, all at once: the corrections that tokens make to one
    another are the solution of a triangular system."""
    q_H1IK, k_H1IK, v_HRIV = (each.movedim(0, 2) for each in (tokens.q_TH1K, tokens.k_TH1K, tokens.v_THRV))
    beta_HRI1 = tokens.beta_THR.movedim(0, 2).unsqueeze(-1)
    total_HRIX = tokens.log_decay_THRX.movedim(0, 2).cumsum(2)
    keys_HRIJ, queries_HRIJ = (_faded_products(x_H1IK, k_H1IK, total_HRIX) for x_H1IK in (k_H1IK, q_H1IK))
    wanted_HRIV = (v_HRIV - (k_H1IK * total_HRIX.exp()) @ state_HRKV) * beta_HRI1
    written_HRIV = torch.linalg.solve_triangular(keys_HRIJ * beta_HRI1, wanted_HRIV, upper=False, unitriangular=True)
    out_HRIV = (q_H1IK * total_HRIX.exp()) @ state_HRKV + queries_HRIJ @ written_HRIV
    last_HR1X = total_HRIX[:, :, -1:]
    left_HRIK = k_H1IK * (last_HR1X - total_HRIX).exp()
    return out_HRIV, state_HRKV * last_HR1X.exp().mT + left_HRIK.mT @ written_HRIV


def _faded_products(x_H1IK: Tensor, k_H1JK: Tensor, total_HRIX: Tensor) -> Tensor:
    """x_i . k_j, faded by all decays after token j up to token i; 0 where j is after i."""
    num_tokens = total_HRIX.shape[2]
    later_IJ = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=total_HRIX.device).triu(1)
    between_HRIJX = total_HRIX.unsqueeze(3) - total_HRIX.unsqueeze(2)
    fade_HRIJX = between_HRIJX.masked_fill(later_IJ.unsqueeze(-1), -torch.inf).exp()
    if fade_HRIJX.shape[-1] == 1:
        return (x_H1IK @ k_H1JK.mT) * fade_HRIJX.squeeze(-1)
    products_HRIJK = x_H1IK.unsqueeze(3) * k_H1JK.unsqueeze(2) * fade_HRIJX
    return products_HRIJK.sum(-1)
