"""Sampling: every rule against a plain reference of one row, and independence of the batch around a row."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from baton.core.sampling import ResolvedSampling
from baton.core.types import TokenOutput
from baton.engine.request import int_array
from baton.engine.sampling.penalties import edits_of
from baton.engine.sampling.random import exponential_noise
from baton.engine.sampling.row import SampleRow
from baton.engine.sampling.sampler import sample, with_logprobs
from tests.device import DEVICE

VOCAB_SIZE = 67
GREEDY = ResolvedSampling(temperature=0.0)
Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def row(
    params: ResolvedSampling,
    *,
    index: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    forbidden: tuple[int, ...] = (),
) -> SampleRow:
    return SampleRow(params, index, forbidden, int_array([*prompt, *output]), len(prompt))


def random_logits(num_rows: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def outputs(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[TokenOutput]:
    sampled = sample(logits.to(DEVICE), rows).to_host()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return sampled.outputs()


def draw(logits: torch.Tensor, *rows: SampleRow) -> list[int]:
    return [token.token_id for token in outputs(logits.clone(), rows)]


def reference_edits(logits: Array, one: SampleRow) -> Array:
    """Bias, penalties and forbidden tokens, one token at a time."""
    logits = logits.copy()
    params = one.params
    prompt, output = one.history[: one.prompt_tokens], one.history[one.prompt_tokens :]
    for token_id in range(len(logits)):
        logits[token_id] += params.logit_bias.get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            factor = params.repetition_penalty
            logits[token_id] = logits[token_id] / factor if logits[token_id] > 0 else logits[token_id] * factor
        logits[token_id] -= params.frequency_penalty * output.count(token_id)
        logits[token_id] -= params.presence_penalty * (token_id in output)
        if token_id in one.forbidden:
            logits[token_id] = -np.inf
    return logits


def reference_probabilities(logits: Array, params: ResolvedSampling) -> Array:
    """The distribution that a row is drawn from."""
    probability = np.exp((logits - logits.max()) / params.temperature)
    order = np.argsort(-probability, kind="stable")
    if params.top_k:
        probability[order[params.top_k :]] = 0
    probability /= probability.sum()
    if params.top_p < 1:
        below = 0.0
        for token_id in order:
            reached, below = below >= params.top_p, below + probability[token_id]
            if reached:
                probability[token_id] = 0
    probability[probability < params.min_p * probability.max()] = 0
    result: Array = probability / probability.sum()
    return result


def reference_token(logits: Array, one: SampleRow) -> int:
    logits = reference_edits(logits, one)
    if one.params.greedy:
        return int(logits.argmax())
    assert one.params.seed is not None
    noise = (
        exponential_noise(torch.tensor([one.params.seed]), torch.tensor([one.output_index]), len(logits))[0]
        .double()
        .numpy()
    )
    with np.errstate(divide="ignore"):
        return int((np.log(reference_probabilities(logits, one.params)) - np.log(noise)).argmax())


PROMPT = (1, 2, 2, 3, 5)
OUTPUT = (3, 4, 4, 4, 8)
ROWS = {
    "greedy": row(GREEDY),
    "plain": row(ResolvedSampling(seed=1)),
    "cold": row(ResolvedSampling(seed=2, temperature=0.3)),
    "hot": row(ResolvedSampling(seed=2, temperature=5.0)),
    "top_k": row(ResolvedSampling(seed=3, top_k=5, temperature=2.0)),
    "top_k beyond the vocabulary": row(ResolvedSampling(seed=3, top_k=500)),
    "top_p": row(ResolvedSampling(seed=4, top_p=0.6, temperature=1.5)),
    "min_p": row(ResolvedSampling(seed=5, min_p=0.2, temperature=1.5)),
    "top_k, top_p, min_p": row(ResolvedSampling(seed=6, top_k=9, top_p=0.8, min_p=0.1, temperature=3.0), index=5),
    "repetition": row(ResolvedSampling(temperature=0.0, repetition_penalty=2.5), prompt=PROMPT, output=OUTPUT),
    "repetition beyond float32": row(
        ResolvedSampling(temperature=0.0, repetition_penalty=1e300), prompt=PROMPT, output=OUTPUT
    ),
    "repetition near 0": row(
        ResolvedSampling(temperature=0.0, repetition_penalty=1e-300), prompt=PROMPT, output=OUTPUT
    ),
    "repetition below 1": row(ResolvedSampling(seed=7, repetition_penalty=0.4), prompt=PROMPT, output=OUTPUT),
    "presence": row(ResolvedSampling(seed=8, presence_penalty=-2.0), prompt=PROMPT, output=OUTPUT),
    "frequency": row(ResolvedSampling(seed=9, frequency_penalty=-2.0), prompt=PROMPT, output=OUTPUT),
    "all penalties": row(
        ResolvedSampling(seed=9, repetition_penalty=1.3, presence_penalty=1.0, frequency_penalty=0.5),
        prompt=PROMPT,
        output=OUTPUT,
    ),
    "penalties before the first output": row(
        ResolvedSampling(temperature=0.0, repetition_penalty=1.5, presence_penalty=1.0), prompt=[7, 9]
    ),
    "bias": row(ResolvedSampling(seed=10, logit_bias={3: 4.0, 60: 6.0, 61: -100.0})),
    "forbidden": row(ResolvedSampling(temperature=0.0), forbidden=(1, 2, 33)),
    "forbidden against bias": row(ResolvedSampling(seed=11, logit_bias={2: 100.0}), forbidden=(2,)),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_drawn_as_the_reference_draws_it(name: str) -> None:
    for seed in range(20):
        logits = random_logits(1, seed=seed)
        one = ROWS[name]._replace(output_index=ROWS[name].output_index + seed)
        assert draw(logits, one) == [reference_token(logits[0].double().numpy(), one)]


def test_a_row_is_drawn_alike_alone_and_in_any_batch() -> None:
    rows = list(ROWS.values())
    logits = random_logits(len(rows))
    together = draw(logits, *rows)
    assert together == [draw(logits[i : i + 1], one)[0] for i, one in enumerate(rows)]
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    assert draw(logits[order], *(rows[i] for i in order)) == [together[i] for i in order]


def test_a_continued_request_draws_the_tokens_of_an_uninterrupted_one() -> None:
    params = ResolvedSampling(seed=12, temperature=1.2, top_p=0.9)
    logits = random_logits(6, seed=3)
    run = draw(logits, *(row(params, index=index) for index in range(6)))
    assert draw(logits[4:], row(params, index=4), row(params, index=5)) == run[4:]


@pytest.mark.parametrize(
    "params",
    [
        ResolvedSampling(temperature=1.0),
        ResolvedSampling(temperature=1.7, top_p=0.85),
        ResolvedSampling(temperature=2.0, top_k=6, min_p=0.05),
    ],
)
def test_many_draws_follow_the_distribution(params: ResolvedSampling) -> None:
    num_draws = 4000
    logits = random_logits(1, seed=5)[:, :12] / 2
    rows = [row(replace(params, seed=seed // 8), index=seed % 8) for seed in range(num_draws)]
    counts = np.bincount(draw(logits.expand(num_draws, -1), *rows), minlength=12)
    expected = reference_probabilities(logits[0].double().numpy(), params) * num_draws
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    degrees = possible.sum() - 1
    # Wilson and Hilferty: the cube root is close to normal; 3.1 standard deviations are exceeded once in a thousand.
    z = ((chi_square / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees))
    assert z < 3.1


def test_equal_logits_rank_by_token_id() -> None:
    logits = torch.zeros(40, VOCAB_SIZE)
    assert draw(logits[:1], row(GREEDY)) == [0]
    seeds = range(40)
    assert set(draw(logits, *(row(ResolvedSampling(seed=seed, top_k=3)) for seed in seeds))) == {0, 1, 2}
    third = ResolvedSampling(top_p=1 / 3 - 0.01)
    assert max(draw(logits, *(row(replace(third, seed=seed)) for seed in seeds))) <= VOCAB_SIZE // 3


@pytest.mark.parametrize("temperature", [1e-45, 1e-10, 100.0])
def test_extreme_temperatures_do_not_break_the_draw(temperature: float) -> None:
    logits = random_logits(1) * 1e4
    token_id = draw(logits, row(ResolvedSampling(temperature=temperature, seed=1, top_p=0.9)))[0]
    assert token_id == int(logits.argmax())


def test_logprobs_are_those_of_the_raw_logits_for_any_row() -> None:
    logits = random_logits(3)
    rows = [
        row(ResolvedSampling(temperature=0.5, seed=1, top_k=1, logit_bias={4: 50.0}, logprobs=2), index=3),
        row(GREEDY),
        row(replace(GREEDY, logprobs=0)),
    ]
    biased, silent, chosen_only = outputs(logits.clone(), rows)
    expected = torch.log_softmax(logits.double(), dim=-1)
    assert (biased.token_id, biased.index) == (4, 3)
    assert biased.logprob == pytest.approx(expected[0, 4].item(), abs=1e-5)
    best = expected[0].topk(2)
    assert [token_id for token_id, _ in biased.top_logprobs] == best.indices.tolist()
    assert [logprob for _, logprob in biased.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert silent == TokenOutput(int(logits[1].argmax()), 0)
    assert chosen_only.logprob == pytest.approx(expected[2].max().item(), abs=1e-5)
    assert chosen_only.top_logprobs == ()


def test_each_row_gets_as_many_alternatives_as_it_asked_for() -> None:
    rows = [row(replace(GREEDY, logprobs=count)) for count in (1, 20, 0)]
    tokens = outputs(random_logits(3), rows)
    assert [len(token.top_logprobs) for token in tokens] == [1, 20, 0]
    few = outputs(torch.zeros(1, 3), [row(replace(GREEDY, logprobs=20))])
    assert len(few[0].top_logprobs) == 3


def test_a_token_that_only_the_device_knows_is_penalised_like_any_other() -> None:
    penalties = ResolvedSampling(temperature=0.0, repetition_penalty=1.4, frequency_penalty=1.0, presence_penalty=0.5)
    prompts: list[list[int]] = [[5, 6], [9], [1, 2, 3], [4]]
    texts: list[list[int]] = [[7, 7, 8], [], [9], [10]]
    newest = [8, 9, -1, 12]
    logits = random_logits(4) / 10
    logits[torch.arange(4), torch.tensor([8, 9, 0, 12])] += 3.0
    rows = [row(penalties, prompt=p, output=o) for p, o in zip(prompts, texts, strict=True)]
    whole = [
        row(penalties, prompt=p, output=[*o, token_id] if token_id >= 0 else o)
        for p, o, token_id in zip(prompts, texts, newest, strict=True)
    ]
    late, known = (logits.to(DEVICE, copy=True) for _ in range(2))
    late_R = sample(late, rows, pending_R=torch.tensor(newest, dtype=torch.int32, device=DEVICE)).chosen_R
    assert torch.equal(late_R, sample(known, whole).chosen_R)
    assert torch.equal(late, known)
    assert not torch.equal(late.cpu(), logits)


class _NothingWaits(TorchDispatchMode):
    """Refuses operations that make the host wait for a GPU: their sizes or numbers depend on data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "nonzero", "bincount", "masked_select", "_unique2", "unique_dim"}
        indices = [one for one in torch.utils._pytree.tree_leaves(args[1:]) if isinstance(one, torch.Tensor)]
        assert not name.startswith("index") or all(one.dtype is not torch.bool for one in indices)
        return func(*args, **(kwargs or {}))


def test_edits_wait_for_nothing_on_the_device() -> None:
    edited = [ROWS[name] for name in ("all penalties", "repetition", "bias", "forbidden", "greedy")]
    pending_R = torch.tensor([3, -1, -1, -1, -1], dtype=torch.int32)
    logits = random_logits(len(edited))
    edits = edits_of(edited, pending_R=pending_R)
    arrays = [[torch.from_numpy(array) for array in edit.arrays] for edit in edits]
    with _NothingWaits():  # type: ignore[no-untyped-call]
        for edit, tensors in zip(edits, arrays, strict=True):
            edit.apply(logits, *tensors)
    with pytest.raises(AssertionError), _NothingWaits():  # type: ignore[no-untyped-call]
        logits[0, 0].item()


@pytest.mark.parametrize("name", ROWS)
def test_only_rows_that_no_graph_can_sample_edit_logits(name: str) -> None:
    in_graph = {"greedy", "plain", "cold", "hot"}
    assert ROWS[name].edits_logits == (name not in in_graph and not name.startswith(("top_", "min_")))


def test_logprobs_of_a_chosen_token_equal_those_of_a_sampled_one() -> None:
    logits = random_logits(3).to(DEVICE)
    counts = [2, 0, 5]
    rows = [row(replace(GREEDY, logprobs=count), index=4) for count in counts]
    chosen = logits.argmax(dim=1).int()
    drawn = with_logprobs(logits, chosen, output_indices=[4, 4, 4], counts=counts).to_host()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert drawn.outputs() == outputs(logits, rows)
