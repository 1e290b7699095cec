"""A runner on each of two ranks, built as a node builds it: the same tokens as one runner, each with its own cache."""

from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from baton.engine.build import build_runner
from baton.models.layers.parallel import TensorParallel
from baton.settings.node_config import NodeSettings
from tests.ranks import run_ranks
from tests.unit.engine.split import Generated, generate, generate_alone
from tests.unit.models.tiny import save_tiny

DEMO = Path(__file__).resolve().parents[3] / "baton" / "models" / "demo"
DEMOS = [DEMO / "llama", DEMO / "deepseek"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Both demo models, and one with five query heads to one kv head: two on one rank, three on the other."""
    five_heads = tmp_path_factory.mktemp("models") / "five_heads"
    save_tiny("falcon-multi-query-five-heads", five_heads)
    return [*DEMOS, five_heads]


@pytest.fixture(scope="module")
def together(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[list[Generated]]:
    """The results by rank and model."""
    return run_ranks(generate, 2, tmp_path_factory.mktemp("ranks"), models)


def test_every_rank_draws_the_tokens_of_the_whole_model(models: list[Path], together: list[list[Generated]]) -> None:
    expected = [alone.tokens for alone in generate_alone(models)]
    for rank in together:
        assert [ours.tokens for ours in rank] == expected


def test_every_rank_computes_the_prompt_logprobs_of_the_whole_model(
    models: list[Path], together: list[list[Generated]]
) -> None:
    expected = [alone.prompt_logprobs for alone in generate_alone(models)]
    for rank in together:
        for ours, alone in zip(rank, expected, strict=True):
            assert len(ours.prompt_logprobs) == 14
            assert ours.prompt_logprobs == pytest.approx(alone, abs=1e-4)


def test_each_rank_has_a_cache_of_its_own_heads(together: list[list[Generated]]) -> None:
    (llama, deepseek, falcon), (other_llama, other_deepseek, other_falcon) = together
    assert (llama.kv_heads, other_llama.kv_heads) == (range(1), range(1, 2))
    assert llama.model_spec.num_kv_heads == 2
    assert llama.spec == other_llama.spec == replace(llama.model_spec, num_kv_heads=1)
    assert deepseek.kv_heads == other_deepseek.kv_heads == range(1)
    assert deepseek.spec == other_deepseek.spec == deepseek.model_spec
    assert falcon.kv_heads == other_falcon.kv_heads == range(1)
    assert falcon.spec == other_falcon.spec == falcon.model_spec


def test_caches_and_steps_are_as_large_as_all_ranks_can_take(together: list[list[Generated]]) -> None:
    assert {(ours.num_blocks, ours.max_batch_tokens) for rank in together for ours in rank} == {(32, 255)}


def test_an_impossible_number_of_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="over 3 ranks: it has 4 query heads") as refused:
        build_runner(NodeSettings(model=DEMOS[0], num_blocks=4, device="cpu"), parallel=TensorParallel(0, 3))
    assert refused.value.allowed == ("1", "2", "4")
