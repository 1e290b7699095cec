"""The plan of experts that follows from a node's settings, and that all its ranks must share."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.errors import ConfigError
from baton.core.expert_load import ExpertLoad, LayerLoad
from baton.engine.build import build_runner
from baton.engine.expert_plan import check_same_plan, plan_experts
from baton.models.families.reader import read_config
from baton.models.layers.parallel import TensorParallel
from baton.settings.node_config import NodeSettings
from tests.ranks import run_ranks
from tests.unit.models.tiny import save_tiny


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixture")
    save_tiny("qwen3-moe", directory)
    return directory


def save_load(directory: Path, model: Path, busy: int) -> Path:
    """A load in which one expert has nearly all tokens."""
    moe = read_config(model).moe
    assert moe is not None
    tokens = tuple(100 if expert == busy else 1 for expert in range(moe.num_experts))
    layers = tuple(LayerLoad(layer=index, tokens=tokens) for index, has in enumerate(moe.layers) if has)
    file = directory / f"{busy}.json"
    file.write_text(ExpertLoad(layers=layers).model_dump_json())
    return file


def test_copies_are_of_the_experts_that_the_file_says(mixture: Path, tmp_path: Path) -> None:
    config = read_config(mixture)
    for busy in (0, 3):
        settings = NodeSettings(
            model=mixture,
            tensor_parallel_size=2,
            expert_parallel=True,
            redundant_experts=1,
            expert_load=save_load(tmp_path, mixture, busy),
        )
        plan = plan_experts(TensorParallel(0, 2, whole_experts=True), config, settings).placement
        assert plan is not None
        assert [[len(turns) for turns in places.turns].index(2) for _, places in plan.mixtures] == [busy] * len(
            list(plan.mixtures)
        )


def test_a_node_of_one_rank_refuses_copies_with_the_reason(mixture: Path) -> None:
    with pytest.raises(ConfigError, match="here there is one rank") as refused:
        build_runner(NodeSettings(model=mixture, device="cpu", num_blocks=4, redundant_experts=2))
    assert (refused.value.field, refused.value.allowed) == ("redundant_experts", ("0",))


def test_a_dense_model_has_no_experts_to_place(mixture: Path, tmp_path: Path) -> None:
    save_tiny("llama-llama3-tied", tmp_path / "dense")
    settings = NodeSettings(model=mixture, expert_parallel=True, expert_load=save_load(tmp_path, mixture, 1))
    with pytest.raises(ConfigError, match="LlamaForCausalLM has none"):
        plan_experts(TensorParallel(0, 2, whole_experts=True), read_config(tmp_path / "dense"), settings)


def test_batch_invariant_ranks_refuse_copies_and_loads(mixture: Path, tmp_path: Path) -> None:
    """Which copy a token takes depends on its row, and another load would move experts to other ranks."""
    given: dict[str, Any] = {"redundant_experts": 2, "expert_load": save_load(tmp_path, mixture, 1)}
    for field, value in given.items():
        settings = NodeSettings(model=mixture, expert_parallel=True, batch_invariant=True, **{field: value})
        with pytest.raises(ConfigError, match=f"batch_invariant is on, and {field} is {value}") as refused:
            plan_experts(TensorParallel(0, 2, whole_experts=True), read_config(mixture), settings)
        assert refused.value.field == field
        assert refused.value.cure == "leave it out, or take --batch-invariant false"


def check_plans(rank: TensorParallel, model: Path, files: tuple[Path, Path]) -> str:
    """What a rank says whose plan is by its own file."""
    settings = NodeSettings(model=model, redundant_experts=1, expert_load=files[rank.rank])
    own = TensorParallel(rank.rank, rank.size, whole_experts=True)
    try:
        check_same_plan(plan_experts(own, read_config(model), settings), torch.device("cpu"))
    except ConfigError as error:
        return error.message
    return ""


def test_ranks_with_different_files_are_refused_on_all_of_them(mixture: Path, tmp_path: Path) -> None:
    one, other = (save_load(tmp_path, mixture, busy) for busy in (0, 3))
    for files, expected in (((one, one), ""), ((one, other), "the ranks would place experts by different loads")):
        directory = tmp_path / f"ranks-{len(expected)}"
        directory.mkdir()
        assert run_ranks(check_plans, 2, directory, mixture, files) == [expected] * 2
