"""Ranks with copies of experts compute the whole model's tokens, and count each expert's tokens as the routers assign
them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import ConfigError
from baton.core.expert_load import ExpertLoad, LayerLoad
from baton.models.config.expert_places import place_layer
from baton.models.families.reader import read_config
from baton.models.kernels.moe.expert_places import find_places
from baton.models.layers.expert_counts import ExpertCounts, expert_load
from baton.models.layers.moe.experts import Experts
from baton.models.layers.parallel import TensorParallel, with_experts_placed
from baton.models.loading.loader import checkpoint_views, load_model
from tests.device import DEVICE
from tests.ranks import run_ranks
from tests.unit.models.fp8_checkpoints import by_block, save_fp8
from tests.unit.models.packed_checkpoints import packed_config, save_gpt_oss, save_packed
from tests.unit.models.paged import backend_for
from tests.unit.models.split import Run, run_model, run_split
from tests.unit.models.test_quantization import DEEPSEEK
from tests.unit.models.test_qwen_vl import CASES
from tests.unit.models.tiny import save_tiny

# Copies in each layer. Five experts (granite-moe, llama4, gemma4) and nine (kimi-k2) are odd numbers.
PLAIN: Mapping[str, int] = MappingProxyType(
    {
        "qwen3-moe": 2,
        "deepseek-v3": 4,
        "gpt-oss": 3,
        "granite-moe": 1,
        "llama4-all-experts-two-of-them-biases": 5,
        "gemma4-experts": 2,
        "kimi-k2": 0,
        "nemotron-h-latent-experts": 2,
    }
)
WIDE = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
QUANTIZED: Mapping[str, Callable[[Path], Any]] = MappingProxyType(
    {
        "deepseek in fp8": lambda path: save_fp8(
            "DeepseekV3", path, by_block, DEEPSEEK, scale_name="weight_scale_inv", fields=WIDE
        ),
        "deepseek in w4a16": lambda path: save_packed("DeepseekV3", path, packed_config(symmetric=False)),
        "gpt-oss in mxfp4": save_gpt_oss,
    }
)
STACKED = "qwen3-vl-moe, experts inputs first"
NAMES = (*PLAIN, *QUANTIZED, STACKED)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in PLAIN:
        save_tiny(name, root / name)
    for name, save in QUANTIZED.items():
        save(root / name)
    CASES["qwen3-vl-moe"].save(root / STACKED)
    inputs_first(root / STACKED / "model.safetensors")
    return {name: root / name / "quantized" if name in QUANTIZED else root / name for name in NAMES}


def inputs_first(file: Path) -> None:
    """As the family is published, not as transformers saves it."""
    tensors = load_file(file)
    turned = {name: each.transpose(1, 2).contiguous() for name, each in tensors.items() if ".mlp.experts." in name}
    assert turned
    save_file(tensors | turned, file)


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[str, Run]:
    return {name: run_model(directory) for name, directory in models.items()}


@pytest.fixture(scope="module")
def together(
    models: dict[str, Path], alone: dict[str, Run], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[tuple[str, int], Run]]:
    """Placed by the load of the same tokens."""
    placed = {name: (PLAIN.get(name, 2), saved(alone[name])) for name in NAMES}
    sizes = dict.fromkeys(NAMES, (2,))
    return run_ranks(run_split, 2, tmp_path_factory.mktemp("ranks"), models, sizes, frozenset(NAMES), placed)


def saved(run: Run) -> ExpertLoad:
    return ExpertLoad(layers=tuple(LayerLoad(layer=layer, tokens=tokens) for layer, tokens in run.routed.items()))


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_whole_model(
    name: str, alone: dict[str, Run], together: list[dict[tuple[str, int], Run]]
) -> None:
    expected, ours = alone[name], together[0][name, 2]
    assert float(expected.logits.std()) > 0.1, "a reference without spread proves nothing"
    most = 1e-5 * max(1.0, float(expected.logits.abs().max()))
    assert float((ours.logits - expected.logits).abs().max()) < most
    assert ours.tokens == expected.tokens
    assert torch.equal(together[1][name, 2].logits, ours.logits)


@pytest.mark.parametrize("name", NAMES)
def test_each_rank_counts_every_token_once(
    name: str, models: dict[str, Path], alone: dict[str, Run], together: list[dict[tuple[str, int], Run]]
) -> None:
    parallel = TensorParallel(0, 2, whole_experts=True)
    config, redundant = read_config(models[name]), PLAIN.get(name, 2)
    placement = with_experts_placed(parallel, config, redundant=redundant, load=saved(alone[name])).placement
    assert placement is not None
    counted = [run[name, 2].counted for run in together]
    assert counted[0] is not None
    assert counted[0] == counted[1]
    load = expert_load(placement, counted[0], model=name)
    assert load.tokens == alone[name].routed
    assert load.redundant_experts == redundant
    for layer in load.layers:
        assert sum(layer.rank_tokens) == sum(layer.tokens)
        assert layer.imbalance < 1.5, "the plan is made for these tokens"


def test_copies_have_the_weights_of_their_expert(models: dict[str, Path]) -> None:
    config = read_config(models["qwen3-moe"])
    assert config.moe is not None
    last = config.moe.num_experts - 1
    tokens = (*[1] * last, 100)
    load = ExpertLoad(
        layers=tuple(LayerLoad(layer=index, tokens=tokens) for index, has in enumerate(config.moe.layers) if has)
    )
    for rank in range(2):
        parallel = TensorParallel(rank, 2, whole_experts=True)
        parallel = with_experts_placed(parallel, config, redundant=2, load=load)
        common: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
        model = load_model(models["qwen3-moe"], config, backend=backend_for(config), parallel=parallel, **common)
        whole = load_model(models["qwen3-moe"], config, backend=backend_for(config), **common)
        theirs = checkpoint_views(whole)
        own = {name: view for name, view in checkpoint_views(model).items() if ".experts." in name}
        assert any(f".experts.{last}." in name for name in own), "it is on both ranks"
        assert all(torch.equal(view, theirs[name]) for name, view in own.items())


def test_a_node_without_whole_experts_has_no_copies(models: dict[str, Path]) -> None:
    config = read_config(models["qwen3-moe"])
    with pytest.raises(ConfigError, match="here there is one rank") as refused:
        with_experts_placed(TensorParallel(), config, redundant=1, load=None)
    assert refused.value.field == "redundant_experts"
    with pytest.raises(ConfigError, match="some channels of all"):
        with_experts_placed(TensorParallel(0, 2), config, redundant=1, load=None)
    with pytest.raises(ConfigError, match="one rank") as unused:
        with_experts_placed(TensorParallel(), config, redundant=0, load=ExpertLoad(layers=()))
    assert unused.value.field == "expert_load"
    assert with_experts_placed(TensorParallel(0, 2), config, redundant=0, load=None).placement is None


# ---- places and counts of one step


@pytest.mark.parametrize(("num_tokens", "choices"), [(1, 2), (7, 3), (300, 4)])
def test_places_and_counts_on_a_gpu_are_those_on_a_cpu(num_tokens: int, choices: int) -> None:
    generator = torch.Generator().manual_seed(0)
    places = place_layer([50, 3, 20, 1, 1, 40], ranks=3, redundant=5)
    experts_TK = torch.rand(num_tokens, 6, generator=generator).topk(choices).indices
    slots_T = torch.where(torch.arange(num_tokens) % 5 == 3, -1, 7)
    found = []
    for rank in range(3):
        experts = Experts(6, 4, 4, dtype=torch.float32, held=range(len(places.ranks[rank])))
        experts.place(places, rank)
        counts = ExpertCounts((1,), places.num_places, "cpu")
        counts.slots_T, experts.counts = slots_T, counts.of_layer(1)
        found.append(experts.places(experts_TK))
        assert experts.turns_EC is not None
        assert experts.copies_E is not None
        on_gpu_P = torch.zeros(places.num_places, dtype=torch.int64, device=DEVICE)
        on_gpu = find_places(
            experts_TK.to(DEVICE, torch.int32),
            experts.turns_EC.to(DEVICE),
            experts.copies_E.to(DEVICE),
            own=experts.own,
            counts_P=on_gpu_P,
            slots_T=slots_T.to(DEVICE),
        )
        assert torch.equal(on_gpu.cpu().long(), found[-1])
        assert torch.equal(on_gpu_P.cpu(), counts.tokens_LP[0])
        counted = counts.fetch().wait()
        assert places.of_experts(counted[1]) == tuple(experts_TK[slots_T >= 0].flatten().bincount(minlength=6).tolist())
    chosen = torch.stack(found)
    of_ranks_T1 = (slots_T >= 0).long().unsqueeze(1)
    assert bool(((chosen >= 0).sum(dim=0) == of_ranks_T1).all()), "each assignment is one rank's, and padding nobody's"
    for rank, own in enumerate(places.ranks):
        mine = chosen[rank] >= 0
        assert torch.equal(torch.tensor(own)[chosen[rank][mine]], experts_TK[mine])


def test_an_expert_without_a_place_is_no_rank_s_and_not_counted() -> None:
    turns_EC = torch.tensor([[0], [-1], [1]], dtype=torch.int32, device=DEVICE)
    copies_E, slots_T = (
        torch.ones(3, dtype=torch.int32, device=DEVICE),
        torch.zeros(2, dtype=torch.int64, device=DEVICE),
    )
    experts_TK = torch.tensor([[0, 1], [2, 1]], dtype=torch.int32, device=DEVICE)
    counts_P = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    places = find_places(experts_TK, turns_EC, copies_E, own=range(1, 2), counts_P=counts_P, slots_T=slots_T)
    assert places.tolist() == [[-1, -1], [0, -1]]
    assert counts_P.tolist() == [1, 1]


def test_copies_take_the_rows_of_a_step_in_turn() -> None:
    places = place_layer([9, 1], ranks=2, redundant=2)
    experts = Experts(2, 4, 4, dtype=torch.float32, held=range(2))
    experts.place(places, 0)
    rows = experts.places(torch.zeros(6, 1, dtype=torch.int64)).flatten().tolist()
    assert sorted(rows[:2]) == [-1, 0]
    assert rows == rows[:2] * 3


def test_a_step_without_known_slots_is_not_counted() -> None:
    experts = Experts(2, 4, 4, dtype=torch.float32, held=range(1))
    counts = ExpertCounts((0,), 2, "cpu")
    experts.counts = counts.of_layer(0)
    experts.places(torch.zeros(3, 1, dtype=torch.int64))
    assert counts.fetch().wait() == {0: (0, 0)}
