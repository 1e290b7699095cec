"""The engine benchmark's arithmetic by hand-computed examples, and its way of running steps on a tiny model."""

from pathlib import Path

import pytest
import torch

from baton.engine.build import BuiltRunner, build_runner
from baton.kvcache.spec import KVCacheSpec, KVKind
from baton.models.families.reader import read_config
from baton.settings.node_config import NodeSettings
from bench.attention.measure import Ceilings
from bench.engine.plot import draw
from bench.engine.roofline import Weights, Work, count_weights, decode_work, prefill_flops
from bench.engine.run import CONFIGS, MODELS, Model
from bench.engine.steps import decode_ms, host_cost, prefill_ms
from bench.table import Row
from tests.unit.models.tiny import save_tiny

LLAMA = read_config(CONFIGS / "llama-3.1-8b")
LITE = read_config(CONFIGS / "deepseek-v2-lite")
KV = KVCacheSpec(KVKind.GQA, 32, 8, 128, "bfloat16")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltRunner:
    directory = tmp_path_factory.mktemp("llama")
    save_tiny("llama", directory)
    return build_runner(NodeSettings(model=directory, num_blocks=64, block_size=8, device="cpu"))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_model_can_be_read(model: Model) -> None:
    assert read_config(CONFIGS / model.name).dtype == "bfloat16"


def test_a_decode_step_reads_weights_once_and_each_requests_kv() -> None:
    weights = Weights(15_000, 7_500, 0, 0)
    work = decode_work(LLAMA, weights, KV, requests=4, context=1000)
    assert work.num_bytes == 15_000 + 4 * 1000 * 32 * 2 * 8 * 128 * 2
    assert work.flops == 2 * 4 * 7_500 + 4 * 1000 * 32 * 4 * 32 * 128


def test_a_window_bounds_the_tokens_read() -> None:
    mistral = read_config(CONFIGS / "mistral-7b")
    weights = Weights(0, 0, 0, 0)
    assert decode_work(mistral, weights, KV, requests=1, context=9000) == decode_work(
        mistral, weights, KV, requests=1, context=4096
    )


def test_experts_are_read_as_far_as_tokens_are_routed_to_them() -> None:
    weights = Weights(0, 0, 6_400, 3_200)
    spec = KVCacheSpec(KVKind.MLA, 27, 1, 576, "bfloat16")
    one = decode_work(LITE, weights, spec, requests=1, context=1)
    assert one.num_bytes == pytest.approx(600 + 27 * 576 * 2)
    many = decode_work(LITE, weights, spec, requests=256, context=1)
    assert many.num_bytes == pytest.approx(6_400 + 256 * 27 * 576 * 2, rel=1e-6)


def test_the_roofline_is_the_larger_limit() -> None:
    machine = Ceilings(copy_gigabytes_per_s=4000, matmul_teraflops=700)
    assert Work(4e9, 1).milliseconds(machine) == pytest.approx(1.0)
    assert Work(1, 1.4e12).milliseconds(machine) == pytest.approx(2.0)


def test_prefill_counts_the_pairs_that_a_causal_mask_leaves() -> None:
    head = LLAMA.vocab_size * LLAMA.hidden_size
    weights = Weights(0, head, 0, 0)
    assert prefill_flops(LLAMA, weights, tokens=3) == 32 * (1 + 2 + 3) * 4 * 32 * 128
    assert prefill_flops(LLAMA, weights, tokens=4, prompts=2) == 32 * 2 * (1 + 2) * 4 * 32 * 128


def test_steps_run_as_the_engine_runs_them(built: BuiltRunner) -> None:
    weights = count_weights(built.runner.model, tied=built.config.tie_word_embeddings)
    total = sum(parameter.numel() for parameter in built.runner.model.parameters())
    assert 0 < weights.dense_numbers < total
    assert decode_ms(built.runner, requests=3, context=20, steps=3) > 0
    assert prefill_ms(built.runner, lengths=[30], chunk=8, rounds=1) > 0
    assert prefill_ms(built.runner, lengths=[9, 9], rounds=1) > 0
    cost = host_cost(built, requests=2, context=9, steps=3)
    assert cost.cpu_ms > 0
    assert cost.wall_ms > 0
    assert torch.isfinite(built.cache.view).all()


def test_the_plot_has_a_panel_for_each_model_and_context(tmp_path: Path) -> None:
    rows = [
        Row("decode step", f"m, batch {batch}, context {context}", 2.0 * batch, "ms", "roofline", 1.0 * batch, 0.8)
        for batch in (1, 8)
        for context in (1024, 8192)
    ]
    rows.append(Row("decode step, graphs off", "m, batch 1, context 1024", 9.0, "ms"))
    draw(rows, tmp_path / "engine.svg")
    text = (tmp_path / "engine.svg").read_text()
    assert "m, context 1024" in text
    assert "m, context 8192" in text
    assert "graphs off" in text
