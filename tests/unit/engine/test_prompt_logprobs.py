"""Prompt logprobs equal those of one forward over the whole prompt, through every event of a request."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.core.sampling import ResolvedSampling
from baton.core.types import PromptLogprob
from baton.engine.batch import Batch, BatchRow, ScoreRow
from baton.engine.build import BuiltRunner, build_runner
from baton.engine.device.graphs import GraphSettings
from baton.engine.request import int_array
from baton.engine.sampling.prompt_scores import score_prompts
from baton.settings.node_config import NodeSettings
from tests.unit.engine.driver import runner_of
from tests.unit.engine.tiny import build, greedy, prompt_of, request, running
from tests.unit.models.tiny import save_tiny

Llama = tuple[Path, Any]
TOLERANCE = 1e-4
LENGTHS = (1, 2, 8, 17, 30)


def scoring(alternatives: int, max_tokens: int = 3) -> ResolvedSampling:
    return ResolvedSampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, prompt_logprobs=alternatives)


def whole_forward(model: Any, prompt: tuple[int, ...]) -> Tensor:
    """transformers' logprobs [prompt tokens, vocabulary] in one forward."""
    with torch.no_grad():
        logprobs: Tensor = model(torch.tensor([prompt])).logits[0].float().log_softmax(dim=-1)
    return logprobs


def assert_right(scored: tuple[PromptLogprob, ...], prompt: tuple[int, ...], alternatives: int, model: Any) -> None:
    assert scored[0] == PromptLogprob(prompt[0], None)
    assert tuple(each.token_id for each in scored) == prompt
    for each, logprobs_V in zip(scored[1:], whole_forward(model, prompt), strict=False):
        assert each.logprob == pytest.approx(logprobs_V[each.token_id].item(), abs=TOLERANCE)
        best = logprobs_V.topk(alternatives)
        assert [token_id for token_id, _ in each.top_logprobs] == best.indices.tolist()
        assert [value for _, value in each.top_logprobs] == pytest.approx(best.values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("max_batch_tokens", [256, 7, 1])
async def test_they_equal_one_forward_however_prompts_are_batched_and_cut(
    llama: Llama, built: BuiltRunner, max_batch_tokens: int
) -> None:
    prompts = {f"r{length}": prompt_of(length, seed=length) for length in LENGTHS}
    async with running(built, max_batch_tokens=max_batch_tokens) as (engine, events):
        engine.submit(request("plain", prompt_of(5, seed=5), greedy(20)))
        for alternatives, (name, prompt) in enumerate(prompts.items()):
            engine.submit(request(name, prompt, scoring(alternatives)))
        await events.finished("plain", *prompts)
    assert events.scored.keys() == prompts.keys()
    for alternatives, (name, prompt) in enumerate(prompts.items()):
        assert_right(events.scored[name], prompt, alternatives, llama[1])


async def test_they_are_the_same_in_every_layout(llama: Llama) -> None:
    settings = NodeSettings(model=llama[0], device="cpu", num_blocks=64, block_size=8, kv_cache_layout="HND")
    prompt = prompt_of(30)
    async with running(build_runner(settings), max_batch_tokens=7) as (engine, events):
        engine.submit(request("a", prompt, scoring(2)))
        await events.finished("a")
    assert_right(events.scored["a"], prompt, 2, llama[1])


@pytest.mark.parametrize("name", ["mistral-window", "deepseek-v3-yarn"])
async def test_a_batch_invariant_engine_gives_the_same_bits_alone_and_in_a_batch(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    built = build_runner(NodeSettings(model=tmp_path, device="cpu", num_blocks=128, block_size=4, batch_invariant=True))
    prompts = {str(length): prompt_of(length, seed=length) for length in (37, 17, 5, 16)}

    async def scored(*names: str) -> dict[str, tuple[PromptLogprob, ...]]:
        async with running(built, prefix_cache=False, max_batch_requests=8, max_batch_tokens=64) as (engine, events):
            for each in names:
                engine.submit(request(each, prompts[each], scoring(3)))
            await events.finished(*names)
        return events.scored

    together = await scored(*prompts)
    for each in ("37", "5"):
        assert (await scored(each))[each] == together[each]


async def test_they_need_every_position_and_their_kv_serves_later_requests(llama: Llama, built: BuiltRunner) -> None:
    prompt = prompt_of(22)
    async with running(built, max_batch_tokens=8) as (engine, events):
        for name, sampling in (("plain", greedy(2)), ("scored", scoring(2)), ("last", greedy(2))):
            engine.submit(request(name, prompt, sampling))
            await events.finished(name)
    assert [events.started[name].cached_tokens for name in ("plain", "scored", "last")] == [0, 0, 20]
    assert_right(events.scored["scored"], prompt, 2, llama[1])
    assert events.ids("plain") == events.ids("scored")[:2] == events.ids("last")


async def test_they_survive_preemption_and_come_once(llama: Llama) -> None:
    prompts = {name: prompt_of(9, seed=seed) for seed, name in enumerate("abcd")}
    async with running(build(llama[0], num_blocks=12), max_batch_tokens=6) as (engine, events):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, scoring(1, max_tokens=20)))
        await events.finished(*prompts)
        assert engine.load().preemptions > 0
    for name, prompt in prompts.items():
        assert_right(events.scored[name], prompt, 1, llama[1])


async def test_a_reserved_request_computes_its_cached_prompt_again(llama: Llama, built: BuiltRunner) -> None:
    prompt = prompt_of(18)
    async with running(built) as (engine, events):
        engine.submit(request("plain", prompt, greedy(2)))
        await events.finished("plain")
        assert engine.reserve(request("scored", prompt, scoring(3))).cached_tokens == 16
        engine.prefill_here("scored", ())
        await events.finished("scored")
    assert_right(events.scored["scored"], prompt, 3, llama[1])


async def test_a_client_that_has_output_has_them_already(built: BuiltRunner) -> None:
    prompt = prompt_of(10)
    async with running(built) as (engine, events):
        engine.submit(request("continued", prompt, scoring(3), output=(5,)))
        engine.reserve(request("here", prompt, scoring(3)))
        engine.prefill_here("here", (5,))
        await events.finished("continued", "here")
    assert events.scored == {}


def test_a_row_of_one_token_runs_outside_of_graphs(llama: Llama, built: BuiltRunner) -> None:
    runner = runner_of(built, graphs=GraphSettings(max_requests=4, max_context_tokens=64))
    runner.prepare()
    prompt, blocks = prompt_of(3), int_array([1])
    found: list[PromptLogprob] = []
    for place in range(len(prompt)):
        row = BatchRow("a", int_array(prompt[place : place + 1]), place, blocks, None)
        score = ScoreRow(int_array(prompt[place + 1 : place + 2]), 2)
        launched = runner.launch(Batch(place + 1, (row,), scores=((0, score),)))
        launched.wait()
        found += launched.scores[0]
    assert_right((PromptLogprob(prompt[0], None), *found), prompt, 2, llama[1])


@pytest.mark.parametrize("piece_bytes", [1, 4 * 50 * 3, 1 << 30])
def test_pieces_of_any_size_give_the_same(piece_bytes: int) -> None:
    generator = torch.Generator().manual_seed(3)
    head_DV = torch.randn(8, 50, generator=generator)
    hidden_TD = torch.randn(12, 8, generator=generator)
    sizes: list[int] = []

    def compute_logits(hidden_RD: Tensor) -> Tensor:
        sizes.append(len(hidden_RD))
        return hidden_RD @ head_DV

    rows = ((0, ScoreRow(int_array([4, 5, 6]), 0)), (1, ScoreRow(int_array(), 2)), (3, ScoreRow(int_array([7, 49]), 3)))
    scored = score_prompts(compute_logits, hidden_TD, [0, 4, 5, 10, 12], rows, vocab=50, piece_bytes=piece_bytes)
    outputs = scored.outputs()
    assert sum(sizes) == 5
    assert max(sizes) == min(5, max(1, piece_bytes // 200))
    logprobs_TV = (hidden_TD @ head_DV).log_softmax(-1)
    expected = {0: [(0, 4), (1, 5), (2, 6)], 1: [], 3: [(10, 7), (11, 49)]}
    for index, places in expected.items():
        assert [each.token_id for each in outputs[index]] == [token_id for _, token_id in places]
        assert [each.logprob for each in outputs[index]] == pytest.approx(
            [logprobs_TV[place].tolist() for place in places], abs=1e-5
        )
        assert [len(each.top_logprobs) for each in outputs[index]] == [dict(rows)[index].alternatives] * len(places)
    assert [token_id for token_id, _ in outputs[3][1].top_logprobs] == logprobs_TV[11].topk(3).indices.tolist()
