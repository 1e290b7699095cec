"""Prompt logprobs on a GPU: the host never waits for them, and pieces change nothing."""

import pytest
import torch
from torch import Tensor

from baton.engine.batch import ScoreRow
from baton.engine.request import int_array
from baton.engine.sampling.prompt_scores import ScoresOnHost, score_prompts
from tests.gpu.waiting import no_waiting

pytestmark = pytest.mark.gpu

VOCAB_SIZE = 128256


def test_scoring_never_makes_the_host_wait_and_equals_the_cpu_in_any_pieces() -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    head_DV = torch.randn(64, VOCAB_SIZE, generator=generator, device="cuda") / 8
    hidden_TD = torch.randn(300, 64, generator=generator, device="cuda")
    targets = torch.randint(0, VOCAB_SIZE, (298,), generator=generator, device="cuda").tolist()
    rows = ((0, ScoreRow(int_array(targets[:99]), 0)), (2, ScoreRow(int_array(targets[99:]), 20)))

    def compute_logits(hidden_RD: Tensor) -> Tensor:
        return hidden_RD @ head_DV

    def score(piece_bytes: int) -> ScoresOnHost:
        return score_prompts(compute_logits, hidden_TD, [0, 100, 101], rows, vocab=VOCAB_SIZE, piece_bytes=piece_bytes)

    score(1 << 24)
    torch.cuda.synchronize()
    with no_waiting():
        pieces, whole = score(1 << 24), score(1 << 40)
    torch.cuda.synchronize()
    logprobs_TV = (hidden_TD.cpu().double() @ head_DV.cpu().double()).log_softmax(-1)
    for scored in (pieces.outputs(), whole.outputs()):
        for place, each in enumerate((*scored[0], *scored[2])):
            expected_V = logprobs_TV[place if place < 99 else place + 2]
            assert each.logprob == pytest.approx(expected_V[each.token_id].item(), abs=2e-3)
            best = expected_V.topk(len(each.top_logprobs)).values.tolist()
            assert [value for _, value in each.top_logprobs] == pytest.approx(best, abs=2e-3)
        assert [len(each.top_logprobs) for each in scored[2]] == [20] * 199
