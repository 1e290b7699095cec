"""Attention data parallelism: ranks that keep the KV of their own requests compute what one process computes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.unit.engine.owners import Outcome, Scene, compute_alone, compute_as_owner, logprobs_of, tokens_of
from tests.unit.models.tiny import save_tiny

DEMO = Path(__file__).resolve().parents[3] / "baton" / "models" / "demo" / "deepseek"
TINY = ("deepseek-v3", "kimi-k2", "deepseek-v32", "glm-moe-dsa-shared-selection", "glm4-moe-lite")
RANKS = 2


def prompt(length: int, seed: int, vocab: int = 60) -> tuple[int, ...]:
    return tuple((seed * 31 + place * place * 7 + place) % vocab for place in range(length))


def greedy(max_tokens: int = 8, **others: int) -> dict[str, Any]:
    return {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "logprobs": 0, **others}


def drawn(seed: int) -> dict[str, Any]:
    return {**greedy(), "temperature": 0.9, "seed": seed, "repetition_penalty": 1.2}


MANY = [(prompt(length, seed), greedy(4 + seed)) for seed, length in enumerate((12, 40, 3, 70, 25))]
MIXED = [(each, drawn(seed) if seed % 2 else how) for seed, (each, how) in enumerate(MANY)]
PREFIX = [(prompt(48, 1), greedy()), (prompt(64, 2), greedy())]
CONTINUED = [((*each, 5, 6, 7, 8), how) for each, how in PREFIX]
SCORED = [
    (prompt(30, 3), greedy(2, prompt_logprobs=2)),
    (prompt(20, 4), greedy()),
]
SCENES: Mapping[str, Scene] = {
    "whole prompts": Scene(DEMO, MIXED),
    "chunks": Scene(DEMO, MIXED, batch_tokens=24),
    "one request": Scene(DEMO, MANY[:1]),
    "one request in graphs": Scene(DEMO, MANY[:1], graphs=True),
    "preemption": Scene(
        DEMO, [(prompt(10, seed), greedy(30)) for seed in range(4)], blocks=14, block_size=4, batch_tokens=32
    ),
    "prefixes": Scene(DEMO, PREFIX, second=CONTINUED),
    "prompt logprobs": Scene(DEMO, SCORED, batch_tokens=16),
    "prompt logprobs in graphs": Scene(DEMO, SCORED, batch_tokens=16, graphs=True),
    "graphs": Scene(DEMO, MIXED, batch_tokens=24, block_size=4, blocks=128, graphs=True),
}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scene]:
    root = tmp_path_factory.mktemp("models")
    for name in TINY:
        save_tiny(name, root / name)
    tiny = {name: Scene(root / name, MIXED, batch_tokens=64) for name in TINY}
    in_graphs = {f"{name} in graphs": Scene(root / name, MIXED, batch_tokens=64, graphs=True) for name in TINY}
    return {**SCENES, **tiny, **in_graphs}


NAMES = [*SCENES, *TINY, *(f"{name} in graphs" for name in TINY)]


@pytest.fixture(scope="module")
def together(scenes: dict[str, Scene], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    """The outcomes by rank and scene."""
    return run_ranks(compute_as_owner, RANKS, tmp_path_factory.mktemp("ranks"), scenes)


@pytest.fixture(scope="module")
def alone(scenes: dict[str, Scene]) -> dict[str, Outcome]:
    return compute_alone(scenes)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_logprobs_are_those_of_one_process(
    name: str, together: list[dict[str, Outcome]], alone: dict[str, Outcome]
) -> None:
    expected = alone[name]
    for rank in together:
        assert tokens_of(rank[name]) == tokens_of(expected)
        torch.testing.assert_close(logprobs_of(rank[name]), logprobs_of(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_s_cache_holds_the_kv_of_its_own_requests_only(name: str, together: list[dict[str, Outcome]]) -> None:
    for rank in together:
        assert rank[name].foreign_blocks == rank[name].unwritten_blocks == 0


def test_requests_are_spread_over_the_ranks(together: list[dict[str, Outcome]]) -> None:
    owners = [owners[-1] for owners in together[0]["whole prompts"].owners.values()]
    assert sorted(set(owners)) == list(range(RANKS))
    assert together[0]["whole prompts"].owners == together[1]["whole prompts"].owners


def test_a_rank_without_requests_helps_the_others(together: list[dict[str, Outcome]]) -> None:
    idle = [rank["one request"].idle_steps for rank in together]
    assert idle[0] == 0
    assert idle[1] > 0


def test_a_preempted_request_is_computed_again(together: list[dict[str, Outcome]]) -> None:
    assert together[0]["preemption"].preemptions > 0


def test_steps_mix_prompts_and_decodes(together: list[dict[str, Outcome]]) -> None:
    assert together[0]["chunks"].mixed_steps > 0


def test_a_request_goes_to_the_rank_that_has_its_prefix(together: list[dict[str, Outcome]]) -> None:
    outcome = together[0]["prefixes"]
    assert [outcome.cached[f"1.{index}"] for index in range(2)] == [48, 64]
    assert [outcome.owners[f"1.{index}"] for index in range(2)] == [outcome.owners[f"0.{index}"] for index in range(2)]
    assert outcome.owners["0.0"] != outcome.owners["0.1"]


@pytest.mark.parametrize("name", ["prompt logprobs", "prompt logprobs in graphs"])
def test_prompt_logprobs_are_those_of_one_process(
    together: list[dict[str, Outcome]], alone: dict[str, Outcome], name: str
) -> None:
    expected = alone["prompt logprobs"].prompt_logprobs["0.0"]
    for rank in together:
        found = rank[name].prompt_logprobs["0.0"]
        assert [each.token_id for each in found] == [each.token_id for each in expected]
        assert [each.logprob for each in found[1:]] == pytest.approx([each.logprob for each in expected[1:]], abs=1e-4)


def test_steps_run_in_the_buffers_of_graphs(together: list[dict[str, Outcome]]) -> None:
    for rank in together:
        for name in ("graphs", "one request in graphs"):
            assert rank[name].launches["decode_graph"] > 0
            assert rank[name].launches["prompt_graph"] > 0


def test_four_ranks_with_unequal_work_compute_what_one_does(
    alone: dict[str, Outcome], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ranks with few tokens next to one with many: the exchange then pads nothing."""
    names = ("chunks", "one request", "one request in graphs", "graphs")
    ranks = run_ranks(compute_as_owner, 4, tmp_path_factory.mktemp("ranks"), {name: SCENES[name] for name in names})
    for rank in ranks:
        for name in names:
            assert tokens_of(rank[name]) == tokens_of(alone[name])
            assert rank[name].foreign_blocks == rank[name].unwritten_blocks == 0
