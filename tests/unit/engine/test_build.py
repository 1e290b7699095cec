"""From settings to a runner: sizes, layouts and dtypes, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.engine.build import build_runner
from baton.settings.config import DEMO_MODELS, MIB
from baton.settings.node_config import NodeSettings
from tests.unit.engine.tiny import greedy, prompt_of, request, running, transformers_greedy
from tests.unit.models.tiny import save_tiny

Llama = tuple[Path, Any]
# Keys and values of 2 layers, 2 heads, 8 channels of 4 bytes.
BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("layout", ["NHD", "hnd", "BLNHC", "BLHNC"])
@pytest.mark.parametrize("block_size", [1, 5])
async def test_every_layout_and_block_size_gives_the_same_tokens(llama: Llama, layout: str, block_size: int) -> None:
    built = build_runner(
        NodeSettings(model=llama[0], kv_cache_layout=layout, block_size=block_size, num_blocks=60, device="cpu")
    )
    assert (built.layout.get_kv_cache_layout().name, built.layout.source) == (layout.upper(), "setting")
    async with running(built, max_batch_tokens=7) as (engine, events):
        engine.submit(request("a", prompt_of(17), greedy(6)))
        await events.finished("a")
    assert events.ids("a") == transformers_greedy(llama[1], prompt_of(17), 6)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("deepseek-v3", "BLNC"),
        ("gemma3", "NHD"),
        ("llama4", "BLHNC"),
        ("gemma3n", "HND"),
        ("gemma4-experts", "BLHNC"),
        ("gpt-oss", "HND"),
        ("falcon-rw", "BLNHC"),
        ("bloom", "NHD"),
    ],
)
async def test_other_families_run_the_same_way(name: str, layout: str, tmp_path: Path) -> None:
    reference = save_tiny(name, tmp_path)
    built = build_runner(
        NodeSettings(model=tmp_path, kv_cache_layout=layout, block_size=4, num_blocks=40, device="cpu")
    )
    prompts = {f"r{length}": prompt_of(length, seed=length) for length in (3, 18)}
    async with running(built, max_batch_tokens=8) as (engine, events):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, greedy(6)))
        await events.finished(*prompts)
    for name, prompt in prompts.items():
        assert events.ids(name) == transformers_greedy(reference, prompt, 6)


async def test_a_longer_context_than_longrope_s_original_takes_its_long_factors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All tokens then equal transformers', where the sequence is that long, in any chunks and with cached prefixes."""
    reference = save_tiny("phi3-longrope-partial", tmp_path)
    settings = NodeSettings(model=tmp_path, block_size=4, num_blocks=80, device="cpu")
    short = build_runner(settings)
    assert short.config.max_context_tokens == 64
    assert "sequences have at most 64 tokens" in caplog.text
    built = build_runner(settings.model_copy(update={"max_context_tokens": 100}))
    assert built.config.max_context_tokens == 512
    assert built.identity.config_digest != short.identity.config_digest
    prompt = prompt_of(80)
    async with running(built, max_batch_tokens=7) as (engine, events):
        for name in ("first", "with a cached prefix"):
            engine.submit(request(name, prompt, greedy(6)))
            await events.finished(name)
            assert events.ids(name) == transformers_greedy(reference, prompt, 6)


def test_a_family_that_overflows_in_float16_is_refused_in_it(tmp_path: Path) -> None:
    save_tiny("gemma2", tmp_path)
    with pytest.raises(ConfigError, match="dtype is float16, in which Gemma2ForCausalLM overflows") as error:
        build_runner(NodeSettings(model=tmp_path, num_blocks=4, dtype="float16", device="cpu"))
    assert "bfloat16" in error.value.cure


def test_an_e5m2_cache_is_refused_for_a_checkpoint_in_fp8(tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    text = (DEMO_MODELS / "llama" / "config.json").read_text()
    (tmp_path / "config.json").write_text(json.dumps({**json.loads(text), "quantization_config": quantization}))
    with pytest.raises(ConfigError, match="fp8_e5m2, and the checkpoint") as error:
        build_runner(NodeSettings(model=tmp_path, kv_cache_dtype="fp8_e5m2", device="cpu"))
    assert error.value.allowed == ("auto", "fp8_e4m3")


def test_a_default_cache_on_a_cpu_holds_the_longest_request(llama: Llama, tmp_path: Path) -> None:
    config = json.loads((llama[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 17}))
    built = build_runner(NodeSettings(model=tmp_path, load_format="dummy", device="cpu", max_context_tokens=100_000))
    assert built.cache.shape.num_slots >= 100_000


def test_the_cache_has_as_many_blocks_as_its_memory_holds(llama: Llama) -> None:
    built = build_runner(NodeSettings(model=llama[0], block_size=5, kv_cache_mib=1, device="cpu"))
    num_blocks = MIB // (BYTES_PER_TOKEN * 5)
    assert built.runner.facts.num_blocks == built.cache.shape.num_blocks == num_blocks
    assert built.cache.size_bytes == BYTES_PER_TOKEN * 5 * num_blocks


def test_on_a_cpu_auto_means_float32_and_a_dtype_can_be_chosen(llama: Llama) -> None:
    auto = build_runner(NodeSettings(model=llama[0], num_blocks=4, device="cpu"))
    half = build_runner(NodeSettings(model=llama[0], num_blocks=4, dtype="bfloat16", device="cpu"))
    assert (auto.cache.spec.dtype, half.cache.spec.dtype) == ("float32", "bfloat16")
    assert auto.identity == half.identity
    assert auto.runner.facts.identity != half.runner.facts.identity


def test_the_cache_can_have_a_dtype_of_its_own(llama: Llama) -> None:
    settings = NodeSettings(model=llama[0], block_size=4, kv_cache_mib=1, device="cpu")
    whole, quarter = (
        build_runner(settings.model_copy(update={"kv_cache_dtype": dtype})) for dtype in ("auto", "fp8_e5m2")
    )
    assert (whole.dtype, whole.cache.spec.dtype) == ("float32", "float32")
    assert (quarter.dtype, quarter.cache.spec.dtype) == ("float32", "float8_e5m2")
    assert quarter.cache.shape.num_blocks == 4 * whole.cache.shape.num_blocks
    assert whole.identity == quarter.identity
    assert whole.runner.facts.identity != quarter.runner.facts.identity


def test_dummy_weights_need_no_checkpoint(llama: Llama, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((llama[0] / "config.json").read_text())
    built = build_runner(NodeSettings(model=tmp_path, num_blocks=4, load_format="dummy", device="cpu"))
    assert built.identity.weights_digest == "dummy"


def test_on_a_cpu_every_size_has_a_default(llama: Llama) -> None:
    built = build_runner(NodeSettings(model=llama[0], device="cpu"))
    assert built.cache.storage.nbytes <= 128 << 20
    assert (built.limits.max_batch_tokens, built.limits.max_batch_requests) == (256, 64)
    assert built.memory is None


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        (
            {"kv_cache_mib": 1, "block_size": 1024, "model": DEMO_MODELS / "llama"},
            "kv_cache_mib",
            "at least 6291456 bytes",
        ),
        ({"num_blocks": 4, "device": "gpu"}, "device", "cuda"),
        ({"num_blocks": 4, "kv_cache_layout": "DHN"}, "kv_cache_layout", "BLNHC"),
        ({"num_blocks": 4, "attention_backend": "FASTEST"}, "attention_backend", "TORCH_SDPA"),
        ({"num_blocks": 4, "attention_backend": "TORCH_MLA"}, "attention_backend", "TORCH_SDPA"),
    ],
)
def test_a_wrong_setting_is_named_with_the_allowed_values(
    llama: Llama, settings: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        build_runner(NodeSettings(**{"model": llama[0], "device": "cpu", **settings}))
    assert refused.value.field == field
    assert message in str(refused.value)
