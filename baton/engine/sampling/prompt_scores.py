"""Logprobs of prompt tokens, from the hidden states of a step. Queues its work on the device and does not wait for it.

Logprobs are the log-softmax of the model's logits. The logits of a long prompt would take gigabytes, so they are
computed in pieces.

Suffixes: T token of the step, P place that is scored, C place of one piece, N alternative, D hidden channel,
V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attention.host_to_device import to_device
from baton.core.types import PromptLogprob
from baton.engine.batch import ScoreRow
from baton.engine.sampling.top_tokens import top_tokens

# Bound of one piece's logits, in float32. Their copies in other types and the log-softmax take two to three times as
# much.
_PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class ScoresOnHost:
    """The logprobs of one step, in host memory that a queued copy fills.

    Args:
        rows: the scored rows of the step, by place in the batch.
        words: int32 [P, 1 + 2N]: the target's logprob, N logprobs, N token ids. Logprobs are float32.
    """

    rows: Sequence[tuple[int, ScoreRow]]
    words: Tensor

    def outputs(self) -> Mapping[int, Sequence[PromptLogprob]]:
        """The logprobs of each scored row's targets. Call it after the copy is done."""
        most = self.words.shape[1] // 2
        values = self.words[:, : 1 + most].view(torch.float32).tolist()
        token_ids = self.words[:, 1 + most :].tolist()
        places = zip(values, token_ids, strict=True)
        return {index: list(_row_outputs(row, places)) for index, row in self.rows}


def score_prompts(
    compute_logits: Callable[[Tensor], Tensor],
    hidden_TD: Tensor,
    starts: Sequence[int],
    rows: Sequence[tuple[int, ScoreRow]],
    *,
    vocab: int,
    piece_bytes: int = _PIECE_BYTES,
) -> ScoresOnHost:
    """Computes the logprobs that these rows ask for.

    Args:
        compute_logits: the model's; returns float32. It runs the same number of times on every rank.
        starts: places of the batch's rows in T.
        rows: the scored rows, by place in the batch.
        piece_bytes: bound of the float32 logits of one piece; a piece has at least one place.
    """
    places = [np.arange(starts[index], starts[index] + len(row.targets), dtype=np.int64) for index, row in rows]
    targets = [np.array(row.targets, np.int64) for _, row in rows]
    places_P, targets_P = to_device((np.concatenate(places), np.concatenate(targets)), hidden_TD.device)
    most = min(vocab, max(row.alternatives for _, row in rows))
    words = torch.empty(len(places_P), 1 + 2 * most, dtype=torch.int32, device=hidden_TD.device)
    size = max(1, piece_bytes // (4 * vocab))
    for places_C, targets_C, words_C in zip(
        places_P.split(size), targets_P.split(size), words.split(size), strict=True
    ):
        if not len(places_C):  # no place is scored
            continue
        logprobs_CV = compute_logits(hidden_TD.index_select(0, places_C)).log_softmax(dim=-1)
        values_CN, token_ids_CN = top_tokens(logprobs_CV, most)
        words_C[:, :1] = logprobs_CV.gather(1, targets_C.unsqueeze(1)).view(torch.int32)
        words_C[:, 1 : 1 + most] = values_CN.view(torch.int32)
        words_C[:, 1 + most :] = token_ids_CN
        del logprobs_CV  # before the next piece
    if words.device.type != "cpu":
        words = torch.empty_like(words, device="cpu", pin_memory=True).copy_(words, non_blocking=True)
    return ScoresOnHost(rows, words)


def _row_outputs(row: ScoreRow, places: Iterator[tuple[list[float], list[int]]]) -> Iterator[PromptLogprob]:
    # NOTE: the targets come first, so that the end of the row takes no place of the next one.
    for target, (values, token_ids) in zip(row.targets, places, strict=False):
        top = tuple(zip(token_ids[: row.alternatives], values[1 : 1 + row.alternatives], strict=False))
        yield PromptLogprob(target, values[0], top)
