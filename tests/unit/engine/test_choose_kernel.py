"""The kernels that choose tokens equal their twin on the CPU, and their noise equals the generator's."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from baton.core.sampling import ResolvedSampling
from baton.engine.request import int_array
from baton.engine.sampling.choice import NO_TOKEN, SamplingArrays, SamplingBuffers, choose_tokens
from baton.engine.sampling.kernels.choose import choose, exponential_of, noise_words
from baton.engine.sampling.random import exponential_noise, random_words
from baton.engine.sampling.row import SampleRow
from tests.device import DEVICE

VOCAB_SIZE = 203
PARAMS = {
    "greedy": ResolvedSampling(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5),
    "plain": ResolvedSampling(),
    "cold": ResolvedSampling(temperature=0.3),
    "hot": ResolvedSampling(temperature=100.0),
    "min_p": ResolvedSampling(min_p=0.1, temperature=1.5),
    "top_k": ResolvedSampling(top_k=3, temperature=2.0),
    "top_k of many": ResolvedSampling(top_k=90, temperature=5.0),
    "top_k beyond the vocabulary": ResolvedSampling(top_k=2**32 - 1),
    "top_p": ResolvedSampling(top_p=0.9, temperature=1.5),
    "top_p of many": ResolvedSampling(top_p=0.95, temperature=50.0),
    "top_p of one": ResolvedSampling(top_p=1e-9),
    "top_p of nearly all": ResolvedSampling(top_p=0.99999994, temperature=3.0),
    "top_k and top_p": ResolvedSampling(top_k=20, top_p=0.6, temperature=3.0),
    "all": ResolvedSampling(top_k=50, top_p=0.9, min_p=0.02, temperature=4.0),
    "frozen": ResolvedSampling(temperature=1e-45, top_p=0.9),
}


def rows_of(seed: int) -> list[SampleRow]:
    seeded = [replace(params, seed=2**63 - 5 + seed * 100 + i) for i, params in enumerate(PARAMS.values())]
    return [SampleRow(params, seed + i, (), int_array(), 0) for i, params in enumerate(seeded)]


def buffers_of(rows: list[SampleRow], *, size: int | None = None, device: str = DEVICE) -> SamplingBuffers:
    arrays = SamplingArrays.empty(len(rows) if size is None else size)
    arrays.fill(rows)
    return SamplingBuffers(*(torch.from_numpy(array).to(device) for array in arrays))


def logits_of(num_rows: int, *, seed: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 4


def by_kernel(logits: torch.Tensor, buffers: SamplingBuffers, *, slice_size: int = 128) -> list[int]:
    out = torch.full((len(logits),), -1, dtype=torch.int32, device=DEVICE)
    choose(logits.to(DEVICE), *buffers, out_R=out, slice_size=slice_size)
    chosen: list[int] = out.tolist()
    return chosen


def by_twin(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    out = torch.empty(len(logits), dtype=torch.int32)
    choose_tokens(logits, buffers_of(rows, device="cpu"), out_R=out)
    chosen: list[int] = out.tolist()
    return chosen


@triton.jit(do_not_specialize=["seed", "position"])  # type: ignore[untyped-decorator]
def _noise_kernel(  # type: ignore[no-untyped-def]
    words_ptr, noise_ptr, seed, position, first_id, TOKENS: tl.constexpr
):
    words = noise_words(seed, position, first_id, TOKENS)
    tl.store(words_ptr + tl.arange(0, TOKENS), words.to(tl.int64))
    tl.store(noise_ptr + tl.arange(0, TOKENS), exponential_of(words))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (12345, 7), (2**63 - 1, 2**31), (-1, 99), (-(2**63), 1)])
def test_a_kernel_draws_the_words_of_the_generator(seed: int, position: int) -> None:
    words, noise = torch.empty(256, dtype=torch.int64, device=DEVICE), torch.empty(256, device=DEVICE)
    _noise_kernel[(1,)](words, noise, seed, position, 512, TOKENS=256)
    key, counter = torch.tensor([seed]), torch.tensor([position])
    assert torch.equal(words.cpu(), random_words(key, counter, 768)[0, 512:])
    expected = exponential_noise(key, counter, 768)[0, 512:]
    torch.testing.assert_close(noise.cpu(), expected, rtol=1e-6, atol=0)


@triton.jit  # type: ignore[untyped-decorator]
def _extremes_kernel(  # type: ignore[no-untyped-def]
    words_ptr, noise_ptr, WORDS: tl.constexpr
):
    words = tl.load(words_ptr + tl.arange(0, WORDS)).to(tl.uint32)
    tl.store(noise_ptr + tl.arange(0, WORDS), exponential_of(words))


def test_the_least_and_the_greatest_words_give_finite_noise() -> None:
    words = torch.tensor([0, 1, 2**8, 2**31, 2**32 - 2**9, 2**32 - 2**7, 2**32 - 2, 2**32 - 1])
    noise = torch.empty(8, device=DEVICE)
    _extremes_kernel[(1,)](words.to(DEVICE), noise, WORDS=8)
    uniform = ((words.float() + 0.5) / 2**32).clamp(max=1 - 2.0**-24)
    torch.testing.assert_close(noise.cpu().double(), -torch.log1p(-uniform.double()), rtol=1e-6, atol=0)
    # The bounds by which the kernel skips tokens.
    assert -noise.min().log() - -noise.max().log() < 26


def rows_named(*names: str, seed: int = 0) -> list[SampleRow]:
    return [rows_of(seed)[list(PARAMS).index(name)] for name in names]


@pytest.mark.parametrize("name", PARAMS)
def test_kernel_and_twin_choose_alike(name: str) -> None:
    rows = [row for seed in range(2) for row in rows_named(name, seed=seed)]
    logits = logits_of(len(rows), seed=7)
    logits[1] = logits[1].bfloat16().float()  # has equal ones
    assert by_kernel(logits, buffers_of(rows)) == by_twin(logits, rows)


def test_neither_slices_nor_the_batch_show_in_a_choice() -> None:
    rows = rows_named("all", "greedy", "hot")
    logits = logits_of(len(rows), seed=9)
    chosen = by_kernel(logits, buffers_of(rows))
    assert by_kernel(logits, buffers_of(rows), slice_size=64) == chosen
    assert by_kernel(logits.flip(0), buffers_of(rows[::-1], size=len(rows) + 3)) == chosen[::-1]


def test_rows_may_lie_apart_in_memory() -> None:
    rows = rows_named("greedy", "plain", "top_k")
    logits = logits_of(len(rows), seed=3, vocab_size=VOCAB_SIZE + 5)[:, :VOCAB_SIZE]
    assert by_kernel(logits, buffers_of(rows)) == by_twin(logits, rows)


def test_of_equal_logits_the_lowest_id_is_taken() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[0, ::2] = -0.0
    logits[1, 100:] = 1.0
    assert by_kernel(logits, buffers_of(rows_named("greedy", "greedy"))) == [0, 100]


@pytest.mark.parametrize(
    "params",
    [ResolvedSampling(top_k=5), ResolvedSampling(top_p=4.5 / VOCAB_SIZE), ResolvedSampling(top_k=10, top_p=0.45)],
)
def test_filters_keep_the_lowest_ids_of_equal_logits(params: ResolvedSampling) -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    rows = [SampleRow(replace(params, seed=seed), 0, (), int_array(), 0) for seed in range(len(logits))]
    chosen = by_kernel(logits, buffers_of(rows))
    assert chosen == by_twin(logits, rows)
    assert set(chosen) <= {0, 1, 2, 3, 4}


def test_tokens_that_are_ruled_out_are_never_drawn() -> None:
    rows = rows_named("hot", "top_k of many", "top_p of nearly all")
    logits = logits_of(len(rows), seed=4)
    logits[:, 70:] = -torch.inf
    chosen = by_kernel(logits, buffers_of(rows))
    assert chosen == by_twin(logits, rows)
    assert max(chosen) < 70


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_a_row_of_invalid_logits_gets_no_token(number: float) -> None:
    rows = rows_named("greedy", "plain", "all", "greedy", "plain")
    logits = logits_of(len(rows), seed=1)
    logits[:3, 0 if number < 0 else 150 :] = number
    if number > 0:
        logits[0] = logits_of(1, seed=2)
        logits[0, 1] = number  # one is enough
    chosen = by_kernel(logits, buffers_of(rows))
    assert chosen[:3] == [NO_TOKEN] * 3
    assert chosen == by_twin(logits, rows)
    assert min(chosen[3:]) >= 0


def test_padding_is_greedy() -> None:
    logits = logits_of(4, seed=2)
    chosen = by_kernel(logits, buffers_of(rows_named("plain", "hot"), size=4))
    assert chosen[2:] == logits[2:].argmax(dim=-1).tolist()
