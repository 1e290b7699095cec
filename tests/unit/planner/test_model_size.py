"""What a model weighs, by its config alone, against the matrices that Baton builds for it; and what a request keeps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.core.errors import ConfigError
from baton.models.config.mtp import with_mtp
from baton.models.families.reader import read_config
from baton.models.loading.loader import _build
from baton.models.loading.needs import kv_cache_spec
from baton.planner.cost_sources import Lengths, kind_by_roofline
from baton.planner.model_size import model_size
from baton.planner.roofline import GPUS, cache_tokens, roofline, state_slots
from tests.unit.models.paged import backend_for
from tests.unit.models.tiny import save_tiny

CONFIGS = Path(__file__).resolve().parents[3] / "bench/engine/configs"
H200 = GPUS["h200"]
FAMILIES = [
    *("llama-llama3-tied", "deepseek-v3", "deepseek-v32", "longcat", "gpt2", "starcoder2", "bloom", "mpt", "arcee"),
    *(
        "opt-no-biases-no-final-norm-tied-projections",
        "apertus",
        "glm4-moe",
        "mimo-v2-flash",
        "llama4",
        "gemma4-wide-mlps",
    ),
    *("gemma3n-unequal-mlps-untied", "gemma4-values-are-keys", "gemma4-experts", "lfm2", "qwen3-next", "qwen3.5-moe"),
    *("kimi-linear", "granite-hybrid", "bamba", "falcon-h1", "nemotron-h-experts", "nemotron-h-latent-experts"),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_weighs_what_is_built_and_keeps_what_a_node_keeps(tmp_path: Path, name: str) -> None:
    save_tiny(name, tmp_path)
    config = replace(read_config(tmp_path), dtype="float32")
    model = _build(config, backend=backend_for(config), dtype=torch.float32, device="meta")
    matrices = sum(parameter.nbytes for parameter in model.parameters() if parameter.dim() > 1)
    size, spec = model_size(config), kv_cache_spec(config, "float32")
    assert size.weight_bytes == pytest.approx(
        matrices, rel=0.04
    )  # filters and gates, which tiny models' widths enlarge
    assert (size.kv_bytes, size.state_bytes) == (spec.bytes_per_token, spec.bytes_per_slot)


def test_mxfp4_is_of_experts_alone(tmp_path: Path) -> None:
    """As published: 13.76 GB of files; the embedding has 1.16 GB of them, and the head as many."""
    size = model_size(read_config(CONFIGS / "gpt-oss-20b"))
    assert size.weight_bytes == pytest.approx(13.76e9, rel=0.01)
    values = json.loads((CONFIGS / "gpt-oss-20b" / "config.json").read_text())
    del values["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert model_size(read_config(tmp_path)).weight_bytes == pytest.approx(41.8e9, rel=0.01)


def test_a_state_takes_memory_and_time_and_bounds_the_requests_of_a_step() -> None:
    size = model_size(read_config(CONFIGS / "nemotron-h-8b"))
    assert size.state_bytes > 20e6
    without = replace(size, state_bytes=0)
    slots = state_slots(size, H200, 1)
    assert (cache_tokens(without, H200, 1) - cache_tokens(size, H200, 1)) * size.kv_bytes == pytest.approx(
        slots * size.state_bytes, rel=1e-3
    )
    seconds = roofline(size, H200).decode_row_s
    assert seconds == pytest.approx(2 * size.state_bytes / 4.56e12)
    assert roofline(without, H200).decode_row_s == 0
    large = kind_by_roofline(replace(size, state_bytes=4 << 30), H200, Lengths(100, 100), ranks=1, link_bytes_per_s=1e9)
    assert large.state_bytes == 4 << 30
    assert 2 <= large.seats == large.prefill_seats < 20


def test_states_that_no_gpu_holds_are_refused_in_one_line() -> None:
    size = replace(model_size(read_config(CONFIGS / "nemotron-h-8b")), state_bytes=10**14)
    message = r"recurrent states of 100,000\.00 GB a request and KV of \d+ tokens"
    with pytest.raises(ConfigError, match=message) as refused:
        kind_by_roofline(size, H200, Lengths(100, 100), ranks=None, link_bytes_per_s=1e9)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("shape", ["deepseek-v3-4-layers", "qwen3-next-24-layers"])
def test_a_layer_that_drafts_takes_the_memory_of_its_weights_and_of_its_kv(shape: str) -> None:
    config = with_mtp(read_config(CONFIGS / shape))
    without, size = model_size(replace(config, drafts=False)), model_size(config)
    added, spec = size.rank_bytes(1) - without.rank_bytes(1), kv_cache_spec(config, "bfloat16")
    assert spec.draft is not None
    assert size.cached_bytes - without.cached_bytes == spec.draft.bytes_per_token
    assert size.cached_bytes == spec.bytes_per_token
    model = _build(config, backend=backend_for(config), dtype=torch.bfloat16, device="meta")
    assert model.mtp is not None
    assert added == pytest.approx(sum(weight.nbytes for weight in model.mtp.parameters()), rel=0.01)
