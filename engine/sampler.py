"""Chooses each row's next token from its logits. Batched tensor code; greedy and drawn rows share a batch.

Order: logits edited as `penalties` says; a row of temperature 0 takes the largest. Another one divides by temperature
and keeps, in this order, the `top_k` largest, of those the fewest whose probability reaches `top_p`, and tokens of at
least `min_p` of the largest probability; equal logits rank by token id. The choice is the Gumbel-max of counter-based
noise, so it depends on the row's logits, its seed and its output position, and not on its batch.

Logprobs are the log-softmax of the logits as the model gave them, before any of that.

Suffixes: R row, S row that is drawn, F row that is filtered, L row that wants logprobs, V vocabulary.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.types import SamplingParams, TokenOutput
from engine.batch import SampleRow
from engine.penalties import edit_logits
from engine.random import exponential_noise

_LEAST_TEMPERATURE = 1e-30  # float32 has nothing below that it could divide by


def sample(logits_RV: Tensor, rows: Sequence[SampleRow]) -> list[TokenOutput]:
    """One token per row. Overwrites `logits_RV`, which is float32. A row that is drawn needs a seed."""
    wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    logprobs_LV = logits_RV[wanted].log_softmax(dim=-1) if wanted else None
    edit_logits(logits_RV, rows)
    chosen_R = _choose(logits_RV, rows)
    token_ids: list[int] = chosen_R.tolist()
    if logprobs_LV is None:
        return [TokenOutput(token_id, row.output_index) for token_id, row in zip(token_ids, rows, strict=True)]
    told = dict(zip(wanted, _logprobs(logprobs_LV, chosen_R[wanted], [rows[i].params for i in wanted]), strict=True))
    nothing: tuple[float | None, tuple[tuple[int, float], ...]] = (None, ())
    return [
        TokenOutput(token_id, row.output_index, *told.get(index, nothing))
        for index, (token_id, row) in enumerate(zip(token_ids, rows, strict=True))
    ]


def _choose(logits_RV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    drawn = [index for index, row in enumerate(rows) if not row.params.greedy]
    if not drawn:
        return logits_RV.argmax(dim=-1)
    if len(drawn) == len(rows):
        return _draw(logits_RV, rows)
    chosen_R = logits_RV.argmax(dim=-1)
    chosen_R[drawn] = _draw(logits_RV[drawn], [rows[index] for index in drawn])
    return chosen_R


def _draw(logits_SV: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    params = [row.params for row in rows]
    temperature_S = torch.tensor([max(p.temperature, _LEAST_TEMPERATURE) for p in params], device=logits_SV.device)
    # The largest becomes 0 before the division, so that no temperature can overflow it.
    logits_SV = (logits_SV - logits_SV.amax(dim=-1, keepdim=True)).div_(temperature_S.unsqueeze(1))
    filtered = [index for index, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    if filtered:
        logits_SV[filtered] = _keep_top(logits_SV[filtered], [params[index] for index in filtered])
    if any(p.min_p > 0 for p in params):
        floor = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        floor_S1 = torch.tensor(floor, device=logits_SV.device).unsqueeze(1)
        logits_SV.masked_fill_(logits_SV < floor_S1, -math.inf)
    seeds = [_seed(p) for p in params]
    noise_SV = exponential_noise(seeds, [row.output_index for row in rows], logits_SV.shape[1], logits_SV.device)
    return logits_SV.sub_(noise_SV.log_()).argmax(dim=-1)


def _keep_top(logits_FV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """-inf for what `top_k` and `top_p` leave out."""
    vocab_size = logits_FV.shape[1]
    device = logits_FV.device
    top_k_F = torch.tensor([p.top_k or vocab_size for p in params], device=device)
    # A row without top_p is not to lose the tokens behind which its probabilities have already summed to 1.
    top_p_F = torch.tensor([p.top_p if p.top_p < 1.0 else math.inf for p in params], device=device)
    sorted_FV, order_FV = logits_FV.sort(dim=-1, descending=True, stable=True)
    dropped_FV = torch.arange(vocab_size, device=device) >= top_k_F.unsqueeze(1)
    probability_FV = sorted_FV.masked_fill_(dropped_FV, -math.inf).softmax(dim=-1)
    before_FV = probability_FV.cumsum(dim=-1) - probability_FV
    dropped_FV |= before_FV >= top_p_F.unsqueeze(1)
    dropped_FV[:, 0] = False
    return sorted_FV.masked_fill_(dropped_FV, -math.inf).new_empty(sorted_FV.shape).scatter_(1, order_FV, sorted_FV)


def _logprobs(
    logprobs_LV: Tensor, chosen_L: Tensor, params: Sequence[SamplingParams]
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    chosen: list[float] = logprobs_LV.gather(1, chosen_L.unsqueeze(1)).squeeze(1).tolist()
    counts = [p.logprobs or 0 for p in params]
    if not any(counts):
        return [(logprob, ()) for logprob in chosen]
    values_LN, ids_LN = logprobs_LV.topk(min(max(counts), logprobs_LV.shape[1]), dim=-1)
    tops = zip(ids_LN.tolist(), values_LN.tolist(), strict=True)
    return [
        (logprob, tuple(zip(ids[:count], values[:count], strict=True)))
        for logprob, count, (ids, values) in zip(chosen, counts, tops, strict=True)
    ]


def _seed(params: SamplingParams) -> int:
    assert params.seed is not None, "the engine draws a seed for every request that has none"
    return params.seed
