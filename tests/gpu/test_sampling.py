"""Sampling on a GPU: no operation makes the host wait, and captured and eager steps choose the same tokens."""

import pytest
import torch

from baton.core.sampling import ResolvedSampling
from baton.core.types import TokenOutput
from baton.engine.request import int_array
from baton.engine.sampling.choice import SamplingArrays, SamplingBuffers, choose_tokens
from baton.engine.sampling.row import SampleRow
from baton.engine.sampling.sampler import sample
from baton.engine.sampling.top_tokens import top_tokens
from tests.gpu.waiting import no_waiting

pytestmark = pytest.mark.gpu

VOCAB_SIZE = 128256
PARAMS = (
    ResolvedSampling(temperature=0.0),
    ResolvedSampling(),
    ResolvedSampling(temperature=0.6, top_k=20, top_p=0.95),
    ResolvedSampling(temperature=0.7, top_p=0.9),
    ResolvedSampling(top_k=50),
    ResolvedSampling(top_k=5000, top_p=0.999, temperature=2.0),
    ResolvedSampling(min_p=0.05),
    ResolvedSampling(top_p=0.95, temperature=10.0),
)
PENALISED = ResolvedSampling(repetition_penalty=1.2, frequency_penalty=0.5, logit_bias={5: 3.0}, logprobs=5, top_p=0.9)


def rows_of(params: tuple[ResolvedSampling, ...], *, index: int) -> list[SampleRow]:
    return [
        SampleRow(
            ResolvedSampling(**{**vars(one), "seed": 2**63 + i}),
            index,
            (7, 8) if one is PENALISED else (),
            int_array([3, 4, 4, 5]) if one is PENALISED else int_array(),
            2 if one is PENALISED else 0,
        )
        for i, one in enumerate(params)
    ]


def logits_of(num_rows: int, *, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=generator, device="cuda") * 3
    return logits.bfloat16().float() if seed % 2 else logits


def outputs(logits: torch.Tensor, rows: list[SampleRow]) -> list[TokenOutput]:
    sampled = sample(logits.clone(), rows).to_host()
    torch.cuda.synchronize()
    return sampled.outputs()


def test_sampling_never_makes_the_host_wait() -> None:
    rows = rows_of((*PARAMS, PENALISED), index=3)
    logits = logits_of(len(rows), seed=0)
    pending_R = torch.full((len(rows),), -1, dtype=torch.int32, device="cuda")
    outputs(logits, rows)  # compiles the kernels
    with no_waiting():
        sampled = sample(logits, rows, pending_R=pending_R).to_host()
    torch.cuda.synchronize()
    assert len(sampled.outputs()) == len(rows)


def test_a_gpu_chooses_as_a_cpu_does() -> None:
    rows = rows_of((*PARAMS, PENALISED), index=3)
    for seed in range(4):
        logits = logits_of(len(rows), seed=seed)
        on_cpu = sample(logits.cpu(), rows).to_host().outputs()
        assert [token.token_id for token in outputs(logits, rows)] == [token.token_id for token in on_cpu]


def test_a_captured_choice_is_the_eager_one() -> None:
    size = len(PARAMS) + 2
    logits = logits_of(size, seed=0)
    arrays = SamplingArrays.empty(size)
    arrays.fill([])
    buffers = SamplingBuffers(*(torch.from_numpy(array).cuda() for array in arrays))
    out_R = torch.empty(size, dtype=torch.int32, device="cuda")
    choose_tokens(logits, buffers, out_R=out_R)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose_tokens(logits, buffers, out_R=out_R)
    for step in range(4):
        rows = rows_of(PARAMS[step:], index=step)
        arrays.fill(rows)
        for tensor, array in zip(buffers, arrays, strict=True):
            tensor.copy_(torch.from_numpy(array))
        logits.copy_(logits_of(size, seed=step))
        graph.replay()
        assert out_R.tolist()[: len(rows)] == [token.token_id for token in outputs(logits[: len(rows)], rows)]


@pytest.mark.parametrize("rows", [1, 2, 4, 16, 64])
def test_top_tokens_of_equal_logits_are_the_same_in_any_number_of_rows(rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    one = torch.randn(VOCAB_SIZE, generator=generator).mul(4).bfloat16().float().log_softmax(dim=-1)
    values, token_ids = top_tokens(one.cuda().expand(rows, -1).contiguous(), 20)
    expected = one.sort(descending=True, stable=True)
    assert expected.values[:20].unique().numel() < 20
    assert token_ids.tolist() == [expected.indices[:20].tolist()] * rows
    assert values.tolist() == [expected.values[:20].tolist()] * rows
