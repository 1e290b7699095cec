"""A model that several ranks compute together is the model that one computes alone."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from baton.errors import ConfigError
from models.config import GQAConfig, ModelConfig
from models.config_reader import read_config
from models.fp8_linear import Fp8Linear
from models.loader import checkpoint_views, load_model
from models.parallel import (
    TensorParallel,
    channels,
    kv_heads,
    local_config,
    padded_rows,
    query_heads,
    vocabulary_rows,
)
from models.shares import Shares
from tests.ranks import run_ranks
from tests.unit.models import tiny
from tests.unit.models.fp8_checkpoints import by_block, by_channel, save_fp8
from tests.unit.models.paged import backend_for
from tests.unit.models.split import Run, run_model, run_split
from tests.unit.models.test_quantization import COMPRESSED_DYNAMIC, DEEPSEEK
from tests.unit.models.tiny import save_tiny

# With two kv heads where there are any, so that four ranks hold each of them twice.
BY_TWO = ("qwen3-window-by-layer-types", "deepseek-v3", "llama4", "gpt-oss")
SPLIT = (
    "llama-llama3-tied",
    "llama-linear-biases-wide-heads",
    "deepseek-v2-q-lora-groups-yarn",
    "gemma2-untied-biases-no-caps",
    "gemma3-untied-layer-types-cap",
    "llama4-all-experts-two-of-them-biases",
    *BY_TWO,
)
MULTI_QUERY = "llama with one kv head"
QUANTIZED: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"llama in fp8 by channel": (4,), "llama in fp8 by block": (2,), "deepseek in fp8 by block": (2,)}
)
SIZES = {**dict.fromkeys((*SPLIT, MULTI_QUERY), (4,)), **dict.fromkeys(BY_TWO, (2, 4)), **QUANTIZED}
WIDE_LLAMA = {"head_dim": 128}
WIDE_DEEPSEEK = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}


def ranks(size: int) -> list[TensorParallel]:
    return [TensorParallel(rank, size) for rank in range(size)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name."""
    root = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        dense = tiny.TINY["llama"][1]
        patch.setattr(tiny, "TINY", {**tiny.TINY, MULTI_QUERY: ("Llama", dense | {"num_key_value_heads": 1})})
        for name in (*SPLIT, MULTI_QUERY):
            save_tiny(name, root / name)
    by_name: dict[str, Callable[[Path], Any]] = {
        "llama in fp8 by channel": lambda path: save_fp8(
            "Llama", path, by_channel, COMPRESSED_DYNAMIC, scale_name="weight_scale"
        ),
        "llama in fp8 by block": lambda path: save_fp8(
            "Llama", path, by_block, DEEPSEEK, scale_name="weight_scale_inv", fields=WIDE_LLAMA
        ),
        "deepseek in fp8 by block": lambda path: save_fp8(
            "DeepseekV3", path, by_block, DEEPSEEK, scale_name="weight_scale_inv", fields=WIDE_DEEPSEEK
        ),
    }
    for name, save in by_name.items():
        save(root / name)
    return {name: root / name / "quantized" if name in by_name else root / name for name in SIZES}


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[str, Run]:
    return {name: run_model(directory) for name, directory in models.items()}


@pytest.fixture(scope="module")
def together(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, int], Run]]:
    """By rank."""
    return run_ranks(run_split, 4, tmp_path_factory.mktemp("ranks"), models, SIZES)


Together = list[dict[tuple[str, int], Run]]
every_split = pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name, sizes in SIZES.items() for size in sizes]
)


@every_split
def test_logits_are_those_of_the_whole_model(name: str, size: int, alone: dict[str, Run], together: Together) -> None:
    expected, ours = alone[name], together[0][name, size]
    assert float(expected.logits.std()) > 0.1, "a reference without spread proves nothing"
    assert float((ours.logits - expected.logits).abs().max()) < 1e-5 * max(1.0, float(expected.logits.abs().max()))
    assert ours.tokens == expected.tokens


@every_split
def test_every_rank_has_the_same_bits_of_all_logits(name: str, size: int, together: Together) -> None:
    first, *others = (together[rank][name, size] for rank in range(size))
    assert all(torch.equal(other.logits, first.logits) for other in others)


@every_split
def test_each_rank_caches_its_heads_and_no_others(
    name: str, size: int, alone: dict[str, Run], together: Together
) -> None:
    whole = alone[name].cache
    for parallel in ranks(size):
        heads = kv_heads(whole.shape[4], parallel)
        expected = whole[:, :, :, :, heads.start : heads.stop]
        own = together[parallel.rank][name, size].cache
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("name", "size"), [(name, size) for name in (*SPLIT, MULTI_QUERY) for size in SIZES[name]])
def test_the_ranks_hold_every_number_of_the_checkpoint(name: str, size: int, models: dict[str, Path]) -> None:
    """What no rank holds would be missing from a sum, and what is held twice there would count twice."""
    config, stored = read_config(models[name]), load_file(models[name] / "model.safetensors")
    times_held: dict[str, torch.Tensor] = {}
    for parallel in ranks(size):
        backend, shares = backend_for(local_config(config, parallel)), Shares(config, parallel)
        model = load_model(models[name], config, backend=backend, dtype="float32", device="cpu", parallel=parallel)
        for path, view in checkpoint_views(model).items():
            share = shares.of(path)
            if share is None:
                assert torch.equal(view, stored[path]), path
                continue
            held = times_held.setdefault(path, torch.zeros_like(stored[path]))
            used = 0
            for part in share.ranges:
                held.narrow(share.dim, part.start, len(part)).add_(1)
                own = view.narrow(share.dim, used, len(part))
                assert torch.equal(own, stored[path].narrow(share.dim, part.start, len(part))), path
                used += len(part)
            assert not view.narrow(share.dim, used, view.shape[share.dim] - used).any(), path
    copies = max(1, size // config.attention.num_kv_heads) if isinstance(config.attention, GQAConfig) else 1
    for path, held in times_held.items():
        expected = copies if ".k_proj." in path or ".v_proj." in path else 1
        assert bool((held == expected).all()), path


@pytest.mark.parametrize("name", ["llama-linear-biases-wide-heads", "deepseek-v3", "llama4"])
def test_dummy_weights_are_parts_of_those_of_the_whole_model(name: str, models: dict[str, Path]) -> None:
    def views(parallel: TensorParallel) -> dict[str, torch.Tensor]:
        backend = backend_for(local_config(config, parallel))
        return checkpoint_views(
            load_model(
                models[name],
                config,
                backend=backend,
                dtype="float32",
                device="cpu",
                load_format="dummy",
                parallel=parallel,
            )
        )

    config = read_config(models[name])
    whole = views(TensorParallel())
    for parallel in ranks(4):
        shares = Shares(config, parallel)
        for path, view in views(parallel).items():
            share = shares.of(path)
            if share is None:
                assert torch.equal(view, whole[path]), path
            else:
                parts = [whole[path].narrow(share.dim, part.start, len(part)) for part in share.ranges]
                held = torch.cat([*parts, view.narrow(share.dim, 0, 0)], share.dim)
                assert torch.equal(view.narrow(share.dim, 0, held.shape[share.dim]), held), path


def test_fp8_weights_are_those_of_their_rows_and_columns(models: dict[str, Path]) -> None:
    directory = models["llama in fp8 by block"]
    config = read_config(directory)

    def layer(parallel: TensorParallel, path: str) -> torch.Tensor:
        backend = backend_for(local_config(config, parallel))
        model = load_model(directory, config, backend=backend, dtype="float32", device="cpu", parallel=parallel)
        module = model.get_submodule(path)
        assert isinstance(module, Fp8Linear)
        return module.dequantized(torch.float32)

    down, gate_up = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate_up_proj"
    parts = [layer(parallel, down) for parallel in ranks(2)]
    assert [part.shape[1] for part in parts] == [128, 144], "cut between blocks, though not in the middle"
    assert torch.equal(torch.cat(parts, dim=1), layer(TensorParallel(), down))
    gates, ups = zip(*(layer(parallel, gate_up).chunk(2) for parallel in ranks(2)), strict=True)
    assert torch.equal(torch.cat((*gates, *ups)), layer(TensorParallel(), gate_up))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("vocab_size", [61, 128, 100_000, 7])
def test_every_token_is_one_rank_s(vocab_size: int, size: int) -> None:
    held = [vocabulary_rows(vocab_size, parallel) for parallel in ranks(size)]
    assert [row for rows in held for row in rows] == list(range(vocab_size))
    assert all(len(rows) <= padded_rows(vocab_size, parallel) for rows, parallel in zip(held, ranks(size), strict=True))


@pytest.mark.parametrize(
    ("num_kv_heads", "expected"),
    [(8, [[0, 1], [2, 3], [4, 5], [6, 7]]), (4, [[0], [1], [2], [3]]), (2, [[0], [0], [1], [1]]), (1, [[0]] * 4)],
)
def test_kv_heads_go_where_their_queries_are(num_kv_heads: int, expected: list[list[int]]) -> None:
    held = [list(kv_heads(num_kv_heads, parallel)) for parallel in ranks(4)]
    assert held == expected
    queries_per_kv_head = 16 // num_kv_heads
    for parallel, heads in zip(ranks(4), held, strict=True):
        assert sorted({head // queries_per_kv_head for head in query_heads(16, parallel)}) == heads


@pytest.mark.parametrize(
    ("size", "block", "expected"),
    [(48, None, [12] * 4), (640, 128, [128, 128, 128, 256]), (1400, 128, [256, 384, 384, 376])],
)
def test_channels_are_cut_in_equal_parts_or_between_blocks(size: int, block: int | None, expected: list[int]) -> None:
    held = [channels(size, parallel, block=block) for parallel in ranks(4)]
    assert [len(part) for part in held] == expected
    assert [channel for part in held for channel in part] == list(range(size))


@pytest.mark.parametrize(
    ("name", "size", "told", "allowed"),
    [
        ("llama-llama3-tied", 3, "it has 4 query heads", ("1", "2", "4")),
        ("llama-llama3-tied", 8, "it has 4 query heads", ("1", "2", "4")),
        ("llama in fp8 by block", 4, "its MLP has 272 channels in blocks of 128", ("1", "2")),
    ],
)
def test_a_number_of_ranks_that_cannot_be_is_refused_with_those_that_can(
    name: str, size: int, told: str, allowed: tuple[str, ...], models: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        local_config(read_config(models[name]), TensorParallel(0, size))
    assert (refused.value.field, refused.value.allowed) == ("tensor_parallel_size", allowed)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda gqa: replace(gqa, num_heads=12, num_kv_heads=6), "it has 6 kv heads"),
        (lambda gqa: replace(gqa, num_heads=8, num_kv_heads=4, head_dim=40), "channels of queries are no multiple"),
    ],
)
def test_heads_that_do_not_come_out_even_are_refused(
    change: Callable[[GQAConfig], GQAConfig], told: str, models: dict[str, Path]
) -> None:
    config = read_config(models["llama in fp8 by block"])
    assert isinstance(config.attention, GQAConfig)
    config = replace(config, attention=change(config.attention), intermediate_size=1024)
    with pytest.raises(ConfigError, match=told):
        local_config(config, TensorParallel(0, 4))


@pytest.mark.parametrize("name", ["bloom", "falcon-rotary"])
def test_families_that_run_on_one_rank_only_say_so(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    config = read_config(tmp_path)
    assert local_config(config, TensorParallel()) == config
    with pytest.raises(ConfigError, match="this family runs on one rank only") as refused:
        local_config(config, TensorParallel(0, 2))
    assert refused.value.allowed == ("1",)


def test_batch_invariance_is_refused_where_ranks_are_summed(models: dict[str, Path]) -> None:
    directory = models["llama-llama3-tied"]
    config: ModelConfig = read_config(directory)
    parallel = TensorParallel(1, 2)
    backend = backend_for(local_config(config, parallel))
    with pytest.raises(ConfigError, match="split over 2 ranks") as refused:
        load_model(
            directory,
            config,
            backend=backend,
            dtype="float32",
            device="cpu",
            batch_invariant=True,
            parallel=parallel,
        )
    assert refused.value.field == "batch_invariant"


def test_a_rank_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank is 2 of 2"):
        TensorParallel(2, 2)
