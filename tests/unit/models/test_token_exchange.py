"""Which shares of a step's tokens ranks have with attention data parallelism, and which models refuse it."""

from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from baton.engine.build import build_runner
from baton.models.config.model_config import MLAConfig
from baton.models.families.reader import read_config
from baton.models.layers.parallel import TensorParallel
from baton.models.layers.token_exchange import TokenShares
from baton.models.loading.local_config import local_config
from baton.models.loading.shares import Shares
from baton.settings.node_config import NodeSettings
from tests.unit.models.tiny import save_tiny

DEMO = Path(__file__).resolve().parents[3] / "baton" / "models" / "demo"
OWN = TensorParallel(1, 2, whole_experts=True, own_attention=True)


@pytest.mark.parametrize(
    ("counts", "starts", "places"),
    [
        ((5, 5), (0, 5), 10),
        ((8, 2), (0, 8), 16),
        ((1, 1, 1, 6), (0, 1, 2, 3), 9),  # padded to 24, they would take more than twice as much
        ((4, 4, 4, 7), (0, 7, 14, 21), 28),
    ],
)
def test_tokens_are_padded_unless_that_costs_more_than_it_saves(
    counts: tuple[int, ...], starts: tuple[int, ...], places: int
) -> None:
    shares = TokenShares.of(counts)
    assert tuple(shares.start(rank) for rank in range(len(counts))) == starts
    assert shares.num_places == places


def test_a_rank_has_all_of_attention_and_its_own_experts() -> None:
    config = read_config(DEMO / "deepseek")
    local, shares = local_config(config, OWN), Shares(config, OWN)
    assert local.attention == config.attention
    assert local.moe is not None
    assert local.moe.own == range(4, 8)
    assert local.intermediate_size == config.intermediate_size // 2
    assert shares.of("model.layers.1.self_attn.o_proj.weight") is None
    assert shares.of("model.layers.0.mlp.down_proj.weight") is not None


def test_heads_need_not_divide_among_ranks_that_have_all_of_them() -> None:
    config = read_config(DEMO / "deepseek")
    assert isinstance(config.attention, MLAConfig)
    odd = replace(config, attention=replace(config.attention, num_heads=7))
    with pytest.raises(ConfigError, match="7 query heads"):
        local_config(odd, replace(OWN, own_attention=False))
    local = local_config(odd, OWN).attention
    assert isinstance(local, MLAConfig)
    assert local.num_heads == 7


def test_it_is_refused_where_it_would_bring_nothing_or_is_not_made(tmp_path: Path) -> None:
    config = read_config(DEMO / "deepseek")
    with pytest.raises(ConfigError, match="would be split by channels") as refused:
        local_config(config, replace(OWN, whole_experts=False))
    assert refused.value.field == "attention_data_parallel"
    assert "--expert-parallel" in refused.value.cure
    with pytest.raises(ConfigError, match="no experts to split"):
        local_config(read_config(DEMO / "llama"), OWN)
    save_tiny("qwen3-moe", tmp_path / "moe")
    with pytest.raises(ConfigError, match="no latent attention"):
        local_config(read_config(tmp_path / "moe"), OWN)
    save_tiny("kimi-linear", tmp_path / "recurrent")
    with pytest.raises(ConfigError, match="recurrent layers"):
        local_config(read_config(tmp_path / "recurrent"), OWN)
    save_tiny("longcat", tmp_path / "spanning")
    with pytest.raises(ConfigError, match="experts span two attentions"):
        local_config(read_config(tmp_path / "spanning"), OWN)
    with pytest.raises(ConfigError, match="slots for adapters") as refused:
        build_runner(NodeSettings(model=DEMO / "deepseek", num_blocks=4, device="cpu", max_adapters=2), parallel=OWN)
    assert refused.value.field == "attention_data_parallel"
