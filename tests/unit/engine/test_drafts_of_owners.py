"""Drafts with attention data parallelism: each rank computes the drafts of its own requests, and all ranks draw the
tokens of one process."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine.build import BuiltRunner, build_runner
from baton.engine.device.graphs import GraphSettings
from baton.models.layers.parallel import TensorParallel
from baton.settings.node_config import NodeSettings
from tests.ranks import run_ranks
from tests.unit.engine.drafted import DRAFTERS, Asked, Outputs, assert_same, token_by_token, with_drafts
from tests.unit.engine.driver import runner_of
from tests.unit.engine.tiny import prompt_of
from tests.unit.models.tiny import save_tiny

RANKS, COUNT = 2, 8
FAMILIES = ("deepseek-v3", "deepseek-v32")
TRIED = ("wrong at 1", "any")
GRAPHS = {"eager": None, "padded": GraphSettings(max_requests=64, max_context_tokens=96, max_tokens=64)}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"logprobs": 1},
    {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.2},
    {"temperature": 1.1, "seed": 4, "top_k": 9},
)


def built(model: Path, **given: Any) -> BuiltRunner:
    return build_runner(NodeSettings(model=model, num_blocks=192, block_size=4, device="cpu"), **given)


def asked(owners: int) -> dict[str, Asked]:
    """One rank has two requests, the other one has one."""
    return {
        f"r{seed}": Asked(prompt_of(4 + 5 * seed, seed=seed), sampling, owner=seed % owners)
        for seed, sampling in enumerate(SAMPLINGS)
    }


def compute_as_owner(
    parallel: TensorParallel, models: Mapping[str, Path], expected: Mapping[str, Outputs]
) -> dict[tuple[str, str, str], Outputs]:
    owned = replace(parallel, whole_experts=True, own_attention=True)
    found = {}
    for family, model in models.items():
        of_rank = built(model, parallel=owned)
        for how, graphs in GRAPHS.items():
            runner = runner_of(of_rank, graphs=graphs)
            runner.prepare()
            for name in TRIED:
                outputs, _ = with_drafts(runner, asked(RANKS), expected[family], DRAFTERS[name]())
                found[family, how, name] = outputs
            for launch in ("decode_graph", "prompt_graph"):
                assert (runner.launches[launch] == 0) == (graphs is None), launch
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in FAMILIES:
        save_tiny(name, root / name)
    return {name: root / name for name in FAMILIES}


def test_all_ranks_draw_the_tokens_of_one_process(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = {
        name: token_by_token(runner_of(built(model), graphs=None), asked(1), COUNT) for name, model in models.items()
    }
    ranks = run_ranks(compute_as_owner, RANKS, tmp_path_factory.mktemp("ranks"), models, expected)
    for found in ranks:
        assert len(found) == len(FAMILIES) * len(GRAPHS) * len(TRIED)
        for (family, _, _), outputs in found.items():
            assert_same(outputs, expected[family])
