"""Models over an fp8 cache compute nearly the logits of an exact cache, with the checkpoint's scales or with 1."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention.layer import Attention
from attention.mla import MLAAttention
from baton.core.errors import ConfigError
from baton.kvcache.spec import FP8_DTYPES
from baton.models.families.reader import read_config
from baton.models.loading.loader import load_model
from tests.unit.models.paged import BLOCK_SIZE, PagedDriver, backend_for
from tests.unit.models.tiny import VOCAB_SIZE, save_tiny

E4M3, E5M2 = FP8_DTYPES
TOKENS = torch.randint(VOCAB_SIZE, (24,), generator=torch.Generator().manual_seed(4)).tolist()
# Bits of a number that the format keeps after its first: rounding moves it by half of the last one at most.
MANTISSA_BITS = {E4M3: 3, E5M2: 2}
SPELLINGS = ["{layer}.{kind}_scale", "{layer}.attn.{kind}_scale", "{layer}.{kind}_proj.{kind}_scale"]
# Scales that are not powers of two and differ by layer and kind, so that no mistake rounds to the same bytes.
SCALES = {(layer, kind): 0.03 * (1 + layer) + offset for layer in (0, 1) for kind, offset in (("k", 0), ("v", 0.07))}


@pytest.fixture(scope="module", params=["llama", "bloom", "deepseek-v3", "longcat"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny(request.param, directory)
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_tiny("llama", directory)
    return directory


def loaded(directory: Path, kv_dtype: str = "") -> PagedDriver:
    config = read_config(directory)
    backend = backend_for(config, kv_dtype=kv_dtype)
    model = load_model(directory, config, backend=backend, dtype="float32", device="cpu", kv_dtype=kv_dtype)
    return PagedDriver(model, backend, kv_dtype=kv_dtype)


def logits_of(driver: PagedDriver) -> Tensor:
    """Logits of TOKENS as two chunks of a prompt and four decodes: new tokens, context and absorbed decodes of MLA."""
    pieces = [TOKENS[:9], TOKENS[9:20], *([token] for token in TOKENS[20:])]
    return torch.cat([driver.step({"r": piece})["r"] for piece in pieces])


def stored_in(driver: PagedDriver, layer_index: int) -> Tensor:
    """The cache's content for TOKENS in one layer, [K, T, H, C] float32, without scales."""
    layer, blocks = driver.cache.layer(layer_index), driver.blocks["r"]
    cells = [(blocks[token // BLOCK_SIZE], token % BLOCK_SIZE) for token in range(len(TOKENS))]
    return torch.stack([layer[:, block, offset].float() for block, offset in cells], dim=1)


def layers_of(driver: PagedDriver) -> list[Attention | MLAAttention]:
    return [module for module in driver.model.modules() if isinstance(module, (Attention, MLAAttention))]


def with_tensors(source: Path, target: Path, tensors: Mapping[str, Tensor]) -> Path:
    """A copy of a checkpoint with additional tensors."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    save_file({**load_file(source / "model.safetensors"), **tensors}, target / "model.safetensors")
    return target


def named(spelling: str, shape: tuple[int, ...] = ()) -> dict[str, Tensor]:
    return {
        spelling.format(layer=f"model.layers.{layer}.self_attn", kind=kind): torch.full(shape, value)
        for (layer, kind), value in SCALES.items()
    }


@pytest.mark.parametrize("kv_dtype", FP8_DTYPES)
def test_logits_are_near_those_over_a_whole_cache_and_not_the_same(checkpoint: Path, kv_dtype: str) -> None:
    whole, rounded = logits_of(loaded(checkpoint)), logits_of(loaded(checkpoint, kv_dtype))
    spread, moved = float(whole.std()), float((rounded - whole).abs().mean())
    assert 1e-3 * spread < moved < 0.1 * spread


@pytest.mark.parametrize("kv_dtype", FP8_DTYPES)
def test_the_first_layer_keeps_each_number_rounded_once(checkpoint: Path, kv_dtype: str) -> None:
    whole, rounded = loaded(checkpoint), loaded(checkpoint, kv_dtype)
    for driver in (whole, rounded):
        logits_of(driver)
    tolerance = 2.0 ** -(MANTISSA_BITS[kv_dtype] + 1)
    torch.testing.assert_close(stored_in(rounded, 0), stored_in(whole, 0), rtol=tolerance, atol=2e-3)


def test_every_layer_has_scales_of_its_own_and_they_are_1(checkpoint: Path) -> None:
    scales = [layer.scales for layer in layers_of(loaded(checkpoint, E4M3))]
    assert len({id(each) for each in scales}) == len(scales) > 1
    for each in scales:
        assert each is not None
        assert not each.calculate
        assert [float(scale) for scale in each.tensors] == [1.0, 1.0, 1.0]


def test_a_cache_as_the_model_computes_has_no_scales(llama: Path) -> None:
    assert [layer.scales for layer in layers_of(loaded(llama))] == [None, None]


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_scales_of_a_checkpoint_are_loaded(llama: Path, tmp_path: Path, spelling: str, shape: tuple[int, ...]) -> None:
    driver = loaded(with_tensors(llama, tmp_path, named(spelling, shape)), E4M3)
    for index, layer in enumerate(layers_of(driver)):
        assert layer.scales is not None
        assert float(layer.scales.q_scale) == 1.0
        assert float(layer.scales.k_scale) == pytest.approx(SCALES[index, "k"])
        assert float(layer.scales.v_scale) == pytest.approx(SCALES[index, "v"])


def test_scales_of_a_checkpoint_are_used(llama: Path, tmp_path: Path) -> None:
    whole, scaled = loaded(llama), loaded(with_tensors(llama, tmp_path, named(SPELLINGS[0])), E4M3)
    expected, ours = logits_of(whole), logits_of(scaled)
    scales_K111 = torch.tensor([SCALES[0, "k"], SCALES[0, "v"]]).view(2, 1, 1, 1)
    torch.testing.assert_close(stored_in(scaled, 0) * scales_K111, stored_in(whole, 0), rtol=2.0**-4, atol=2e-3)
    assert float((ours - expected).abs().mean()) < 0.1 * float(expected.std())


@pytest.mark.parametrize("spelling", SPELLINGS[:2])
def test_a_scale_of_softmax_weights_is_loaded_and_changes_nothing(llama: Path, tmp_path: Path, spelling: str) -> None:
    name = spelling.format(layer="model.layers.1.self_attn", kind="prob")
    plain = loaded(with_tensors(llama, tmp_path / "plain", named(spelling)), E4M3)
    directory = with_tensors(llama, tmp_path / "scaled", named(spelling) | {name: torch.tensor(0.004)})
    scaled = loaded(directory, E4M3)
    scales = [layer.scales for layer in layers_of(scaled)]
    assert [float(each.prob_scale) for each in scales if each is not None] == pytest.approx([1.0, 0.004])
    assert torch.equal(logits_of(scaled), logits_of(plain))
    assert torch.equal(logits_of(loaded(directory)), logits_of(loaded(llama)))


def test_scales_for_e4m3_are_refused_for_a_cache_in_e5m2(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype is fp8_e5m2, .* such as model\.layers\.0\.self_attn\.k_scale"
    ):
        loaded(with_tensors(llama, tmp_path, named(SPELLINGS[0])), E5M2)


def test_latents_have_the_scale_of_keys(tmp_path: Path) -> None:
    save_tiny("deepseek-v3", tmp_path / "plain")
    scales = {f"model.layers.{index}.self_attn.k_scale": torch.tensor(0.04) for index in range(3)}
    whole = loaded(tmp_path / "plain")
    scaled = loaded(with_tensors(tmp_path / "plain", tmp_path / "scaled", scales), E4M3)
    expected, ours = logits_of(whole), logits_of(scaled)
    torch.testing.assert_close(stored_in(scaled, 0) * 0.04, stored_in(whole, 0), rtol=2.0**-4, atol=2e-3)
    assert float((ours - expected).abs().mean()) < 0.1 * float(expected.std())


def test_a_whole_cache_passes_over_a_checkpoints_scales(llama: Path, tmp_path: Path) -> None:
    scaled = loaded(with_tensors(llama, tmp_path, named(SPELLINGS[1])))
    assert torch.equal(logits_of(scaled), logits_of(loaded(llama)))


@pytest.mark.parametrize("value", [0.0, -1.0, torch.inf, torch.nan])
def test_a_scale_that_no_cache_can_be_read_with_is_refused(llama: Path, tmp_path: Path, value: float) -> None:
    wrong = named(SPELLINGS[0]) | {"model.layers.1.self_attn.v_scale": torch.tensor(value)}
    with pytest.raises(
        ConfigError, match=r"layers\.1\.self_attn\.v_scale is .*; allowed: a finite number above 0"
    ) as refused:
        loaded(with_tensors(llama, tmp_path, wrong), E4M3)
    assert refused.value.field == "kv_cache_dtype"


def test_half_a_layers_scales_and_scales_per_head_are_refused(llama: Path, tmp_path: Path) -> None:
    half = {"model.layers.0.self_attn.k_scale": torch.tensor(0.5)}
    with pytest.raises(ConfigError, match=r"1 missing: model\.layers\.0\.self_attn\.v_scale"):
        loaded(with_tensors(llama, tmp_path, half), E4M3)
    with pytest.raises(ConfigError, match=r"4 unfit: .*_scale in .* is \[2\], the config needs \[\]"):
        loaded(with_tensors(llama, tmp_path, named(SPELLINGS[0], (2,))), E4M3)
