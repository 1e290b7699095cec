"""Drafts of an MTP layer with attention data parallelism: each rank computes the layer for its own requests, and all
ranks have the tokens and drafts of one process."""

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
from tests.unit.engine.driver import Driver, runner_of
from tests.unit.engine.tiny import prompt_of
from tests.unit.models.tiny_mtp import save_with_mtp

RANKS, DRAFTS = 2, 3
FAMILIES = ("deepseek-v3", "deepseek-v32")
GRAPHS = {"eager": None, "padded": GraphSettings(max_requests=64, max_context_tokens=96, max_tokens=64)}
PROMPTS = {f"r{seed}": prompt_of(5 + 8 * seed, seed=seed) for seed in range(3)}
# The requests of each step. Rank 1 has only r1, so in some steps it has nothing to compute.
STEPS = [("r0",), ("r0", "r1", "r2"), ("r0", "r1", "r2"), ("r2", "r0"), *[("r1", "r0", "r2")] * 4, ("r0",), ("r1",)]
# Of each step, the tokens and drafts of each request after it.
Found = list[dict[str, tuple[list[int], tuple[int, ...]]]]


def built(model: Path, **given: Any) -> BuiltRunner:
    settings = NodeSettings(model=model, num_blocks=96, block_size=16, device="cpu", speculation="always")
    return build_runner(settings, **given)


def steps_of(of_model: BuiltRunner, graphs: GraphSettings | None, *, owners: int) -> Found:
    runner = runner_of(of_model, graphs=graphs)
    runner.prepare()
    driver, found = Driver(runner, num_layer_drafts=DRAFTS), Found()
    for index, (name, prompt) in enumerate(PROMPTS.items()):
        driver.add(name, prompt, owner=index % owners)
    for number, names in enumerate(STEPS):
        # The first draft token of every second request is what the layer drafted, and the second one is any token.
        drafts = {name: [driver.layer_drafts[name][0], 7] for name in names[::2]} if number >= 6 else None
        driver.step(*names, chunk=12, drafts=drafts)
        found.append(
            {name: (driver.ids(name), driver.layer_drafts[name]) for name in names if name in driver.layer_drafts}
        )
    for launch in ("decode_graph", "prompt_graph"):
        assert (runner.launches[launch] == 0) == (graphs is None)
    return found


def compute_as_owner(parallel: TensorParallel, models: Mapping[str, Path]) -> dict[tuple[str, str], Found]:
    owned = replace(parallel, whole_experts=True, own_attention=True)
    return {
        (family, how): steps_of(built(model, parallel=owned), graphs, owners=RANKS)
        for family, model in models.items()
        for how, graphs in GRAPHS.items()
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in FAMILIES:
        save_with_mtp(name, root / name)
    return {name: root / name for name in FAMILIES}


def test_all_ranks_have_the_drafts_of_one_process(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = {name: steps_of(built(model), None, owners=1) for name, model in models.items()}
    ranks = run_ranks(compute_as_owner, RANKS, tmp_path_factory.mktemp("ranks"), models)
    for of_rank in ranks:
        assert len(of_rank) == len(FAMILIES) * len(GRAPHS)
        for (family, _), found in of_rank.items():
            assert found == expected[family]
    lengths = [len(words) for found in expected.values() for step in found for _, words in step.values()]
    assert max(lengths) == DRAFTS
