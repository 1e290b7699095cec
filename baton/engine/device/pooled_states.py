"""Sums of rows' hidden states, on the device. Queues its work and does not wait for it.

Suffixes: T token of the step, P pooled row, C place in a span, H row with a head, D hidden channel, N value.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attention.host_to_device import to_device
from baton.engine.pooling import SUM_SCALE, PooledRows, PoolRow, Values
from baton.models.layers.causal_lm import CausalLM


@dataclass(frozen=True)
class PoolsOnHost:
    """The pooled values of one step, in host memory that a queued copy fills.

    Args:
        parts: [P, N], sums in float64 and others in float32, each with the rows' places in the batch and their numbers
            of values.
    """

    parts: Sequence[tuple[Sequence[tuple[int, int]], Tensor]]

    def outputs(self) -> PooledRows:
        """The values of each row. Call it after the copy is done."""
        found: dict[int, Values] = {}
        for rows, values in self.parts:
            found.update((place, values[index, :size].numpy().copy()) for index, (place, size) in enumerate(rows))
        return found


def pool_states(
    model: CausalLM, hidden_TD: Tensor, starts: Sequence[int], rows: Sequence[tuple[int, PoolRow]]
) -> PoolsOnHost:
    """Sums the hidden states that these rows ask for, in float64, or applies a head of the model to them. The state of
    a single token stays as it is.

    Args:
        starts: places of the batch's rows in T.
        rows: the pooled rows, by place in the batch. A row with a head has one token.
    """
    parts = []
    states = [(place, row) for place, row in rows if not row.logits_of and not row.classify]
    if summed := [(place, row) for place, row in states if row.stop - row.start > 1]:
        values_PD = _sums(hidden_TD, starts, summed)
        parts.append(([(place, values_PD.shape[1]) for place, _ in summed], _to_host(values_PD)))
    if single := [(place, row) for place, row in states if row.stop - row.start == 1]:
        values_PD = _only_states(hidden_TD, starts, single).float()
        parts.append(([(place, values_PD.shape[1]) for place, _ in single], _to_host(values_PD)))
    if classified := [(place, row) for place, row in rows if row.classify]:
        values_HN = model.classify(_only_states(hidden_TD, starts, classified))
        parts.append(([(place, values_HN.shape[1]) for place, _ in classified], _to_host(values_HN.float())))
    if scored := [(place, row) for place, row in rows if row.logits_of]:
        logits_HV = model.compute_logits(_only_states(hidden_TD, starts, scored))
        most = max(len(row.logits_of) for _, row in scored)
        wanted = np.zeros((len(scored), most), np.int64)
        for index, (_, row) in enumerate(scored):
            wanted[index, : len(row.logits_of)] = row.logits_of
        (wanted_HN,) = to_device((wanted,), hidden_TD.device)
        values_HN = logits_HV.gather(1, wanted_HN).float()
        parts.append(([(place, len(row.logits_of)) for place, row in scored], _to_host(values_HN)))
    return PoolsOnHost(parts)


def _sums(hidden_TD: Tensor, starts: Sequence[int], rows: Sequence[tuple[int, PoolRow]]) -> Tensor:
    places = [np.arange(starts[place] + row.start, starts[place] + row.stop, dtype=np.int64) for place, row in rows]
    lengths = np.array([row.stop - row.start for _, row in rows], np.int64)
    places_C, lengths_P = to_device((np.concatenate(places), lengths), hidden_TD.device)
    states_CD = hidden_TD.index_select(0, places_C).double().mul_(SUM_SCALE).round_()
    return torch.segment_reduce(states_CD, "sum", lengths=lengths_P, axis=0).div_(SUM_SCALE)


def _only_states(hidden_TD: Tensor, starts: Sequence[int], rows: Sequence[tuple[int, PoolRow]]) -> Tensor:
    places = np.array([starts[place] + row.start for place, row in rows], np.int64)
    (places_H,) = to_device((places,), hidden_TD.device)
    return hidden_TD.index_select(0, places_H)


def _to_host(values: Tensor) -> Tensor:
    if values.device.type == "cpu":
        return values
    return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
