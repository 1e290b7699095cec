"""The roofline against measured steps of an H200 in `bench/results/engine.md`."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.costs import StepCosts, StepWork, chunk_pairs
from baton.core.errors import ConfigError
from baton.models.config.mtp import with_mtp
from baton.models.families.reader import read_config
from baton.models.layers.parallel import TensorParallel, with_experts_placed
from baton.models.loading.loader import _build
from baton.models.loading.local_config import local_config
from baton.planner.cost_sources import Lengths, kind_by_roofline
from baton.planner.memory import GIB, rank_memory
from baton.planner.model_size import ModelSize, model_size
from baton.planner.roofline import GPUS, cache_tokens, gpu_of, roofline
from tests.unit.models.paged import backend_for

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "bench/engine/configs"
MEASURED = (ROOT / "bench/results/engine.md").read_text()
MODELS = sorted(name for path in CONFIGS.glob("*/config.json") if f"| {(name := path.parent.name)}, " in MEASURED)


def size_of(name: str) -> ModelSize:
    return model_size(read_config(CONFIGS / name))


def errors(name: str, costs: StepCosts) -> Iterator[float]:
    """Predicted over measured seconds, less 1, of all rows of one model."""
    for line in MEASURED.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 4 or not cells[2].startswith(f"{name}, "):
            continue
        if cells[1] == "decode step":
            rows, context = map(int, re.findall(r"(?:batch|context) (\d+)", cells[2]))
            yield costs.seconds(StepWork(rows, rows * context)) / (1e-3 * float(cells[3].split()[0])) - 1
        elif cells[1] == "prefill" and "steps of" not in cells[2]:
            prompts = 8 if "8 prompts" in cells[2] else 1
            work = StepWork(0, 0, 8192, prompts * chunk_pairs(0, 8192 // prompts))
            measured_ms = float(cells[2].removesuffix(" ms").rpartition(" ")[2]) if prompts == 1 else None
            found = re.search(r": ([\d.]+) ms", cells[2])
            assert found is not None
            yield costs.seconds(work) / (1e-3 * (measured_ms or float(found[1]))) - 1


@pytest.mark.parametrize("name", MODELS)
def test_an_h200_is_within_a_fifth_in_every_row_and_a_tenth_in_the_mean(name: str) -> None:
    found = list(errors(name, roofline(size_of(name), GPUS["h200"])))
    assert len(found) >= 5
    assert max(map(abs, found)) < 0.2
    assert sum(map(abs, found)) / len(found) < 0.1


def test_sizes_are_those_of_the_published_models() -> None:
    llama = size_of("llama-3.1-8b")
    assert llama.weight_bytes == pytest.approx(16.06e9, rel=1e-3)
    assert llama.kv_bytes == 131072
    assert size_of("deepseek-v2-lite").weight_bytes == pytest.approx(31.4e9, rel=1e-2)


@pytest.mark.parametrize("whole_experts", [False, True])
def test_a_rank_of_deepseek_v3_weighs_what_is_computed(whole_experts: bool) -> None:
    config = read_config(CONFIGS / "deepseek-v3-4-layers")
    local = local_config(config, TensorParallel(0, 8, whole_experts=whole_experts))
    model = _build(local, backend=backend_for(local), dtype=torch.bfloat16, device="meta")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert model_size(config).rank_bytes(8) == pytest.approx(weights, rel=0.01)


def test_redundant_experts_weigh_what_is_computed() -> None:
    config = read_config(CONFIGS / "deepseek-v3-4-layers")
    parallel = with_experts_placed(TensorParallel(3, 8, whole_experts=True), config, redundant=32, load=None)
    local = local_config(config, parallel)
    common: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta", "parallel": parallel}
    model = _build(local, backend=backend_for(local), **common)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    size = model_size(config, redundant_experts=32)
    assert size.rank_bytes(8) == pytest.approx(weights, rel=0.01)
    assert config.moe is not None
    expert_bytes = 3 * 7168 * 2048 * 2
    added = size.rank_bytes(8) - model_size(config).rank_bytes(8)
    assert added == pytest.approx(32 / 8 * sum(config.moe.layers) * expert_bytes)
    assert size.ranks_min == 2
    assert cache_tokens(size, GPUS["h200"], 8) < cache_tokens(model_size(config), GPUS["h200"], 8)


def test_redundant_experts_need_experts_and_ranks() -> None:
    with pytest.raises(ConfigError, match="no experts to copy"):
        model_size(read_config(CONFIGS / "llama-3.1-8b"), redundant_experts=1)
    size = model_size(read_config(CONFIGS / "deepseek-v3-4-layers"), redundant_experts=257)
    with pytest.raises(ConfigError, match="redundant experts need more ranks") as refused:
        kind_by_roofline(size, GPUS["h200"], Lengths(100, 100), ranks=2, link_bytes_per_s=1e9)
    assert refused.value.allowed == ("at least 3",)


def test_deepseek_v3_fits_eight_h200s_and_not_four(tmp_path: Path) -> None:
    """As published: 61 layers, 671 billion parameters in fp8. Each rank holds a billion of them."""
    fields = json.loads((CONFIGS / "deepseek-v3-4-layers" / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    fields |= {"num_hidden_layers": 61, "quantization_config": fp8}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    size = model_size(read_config(tmp_path))
    assert size.weight_bytes == pytest.approx(673e9, rel=0.01)
    assert size.rank_bytes(8) == pytest.approx(85e9, rel=0.01)
    assert cache_tokens(size, GPUS["h200"], 8) == pytest.approx(612_000, rel=0.01)
    assert cache_tokens(size, GPUS["h200"], 4) < 0
    own = size.with_own_attention()
    assert own.rank_bytes(8) == pytest.approx(94e9, rel=0.01)
    assert cache_tokens(own, GPUS["h200"], 8) == pytest.approx(3_830_000, rel=0.02)
    drafting = model_size(with_mtp(read_config(tmp_path)))
    assert drafting.rank_bytes(8) == pytest.approx(86e9, rel=0.01)
    assert cache_tokens(drafting, GPUS["h200"], 8) == pytest.approx(582_000, rel=0.01)
    own = drafting.with_own_attention()
    assert own.rank_bytes(8) == pytest.approx(96e9, rel=0.01)
    assert cache_tokens(own, GPUS["h200"], 8) == pytest.approx(3_600_000, rel=0.02)


def test_the_memory_of_ranks_is_about_what_four_of_half_of_deepseek_v3_logged(tmp_path: Path) -> None:
    fields = json.loads((CONFIGS / "deepseek-v3-4-layers" / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 30, "quantization_config": fp8}))
    size = model_size(read_config(tmp_path)).with_own_attention()
    found = rank_memory(size, GPUS["h200"].memory_gib, 4)
    assert found.weights == pytest.approx(79.2 * GIB, rel=0.03)
    assert found.steps == pytest.approx(3.2 * GIB, rel=0.05)
    assert found.graphs == pytest.approx((3.0 - 1.6 * 0.75) * GIB, rel=0.05)
    assert found.kv_cache == pytest.approx((38.4 + 1.6 * 0.75) * GIB, rel=0.06)


def test_a_rank_with_requests_of_its_own_weighs_what_is_computed_and_leaves_room_on_every_rank() -> None:
    config = read_config(CONFIGS / "deepseek-v3-4-layers")
    own = TensorParallel(0, 8, whole_experts=True, own_attention=True)
    local = local_config(config, own)
    model = _build(local, backend=backend_for(local), dtype=torch.bfloat16, device="meta")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    size = model_size(config)
    assert size.with_own_attention().rank_bytes(8) == pytest.approx(weights, rel=0.01)
    split, whole = (cache_tokens(each, GPUS["h200"], 8) for each in (size, size.with_own_attention()))
    assert 6 * split < whole < 8 * split
    with pytest.raises(ConfigError, match="latent attention and experts"):
        size_of("llama-3.1-8b").with_own_attention()


def test_the_cache_is_what_the_weights_leave() -> None:
    llama = size_of("llama-3.1-8b")
    # A node on an H200 gave 106.5 GiB to it.
    assert cache_tokens(llama, GPUS["h200"], 1) == pytest.approx(106.5 * GIB / 131072, rel=0.01)
    parts = rank_memory(llama, GPUS["h200"].memory_gib, 1)
    assert str(parts).startswith("weights 15.0 GiB, KV cache 10")
    assert str(parts).endswith("GiB, steps 0.9 GiB, graphs 1.4 GiB, staging 2.0 GiB of 140.4")
    assert cache_tokens(llama, GPUS["l4"], 1) < 20_000
    assert cache_tokens(llama, GPUS["l4"], 2) > 50_000


def test_more_ranks_are_faster_and_less_than_so_many_times() -> None:
    one, two = (roofline(size_of("llama-3.1-8b"), GPUS["h200"], ranks) for ranks in (1, 2))
    work = StepWork(64, 64 * 2000)
    assert 0.5 < two.seconds(work) / one.seconds(work) < 0.9


def test_a_gpu_that_is_not_known_is_refused_with_those_that_are() -> None:
    assert gpu_of("H200").memory_gib == 140.4
    with pytest.raises(ConfigError, match="h200"):
        gpu_of("h2000")
