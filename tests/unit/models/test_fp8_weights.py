"""fp8 checkpoints: the logits equal those of the dequantized weights for every granularity of scales; wrong weights
and scales are refused by name."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.core.errors import ConfigError
from baton.models.families.reader import read_config
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.linear import Linear
from baton.models.layers.moe.experts import Experts
from baton.models.loading.loader import load_model
from baton.models.quantization.fp8_linear import Fp8Linear
from tests.unit.models.fp8_checkpoints import VOCAB_SIZE, Pair, by_block, by_channel, by_tensor, save_fp8
from tests.unit.models.paged import PagedDriver, backend_for
from tests.unit.models.test_quantization import AUTO_FP8, COMPRESSED_BLOCKS, COMPRESSED_DYNAMIC, DEEPSEEK

E4M3 = torch.float8_e4m3fn
TOKENS = torch.randint(VOCAB_SIZE, (20,), generator=torch.Generator().manual_seed(0)).tolist()
AUTO_DYNAMIC = AUTO_FP8 | {"activation_scheme": "dynamic"}
SECOND_LAYER = {"modules_to_not_convert": ["model.layers.1.self_attn"]}


def loaded(directory: Path, *, dtype: str = "float32", load_format: str = "safetensors") -> tuple[CausalLM, Tensor]:
    config = read_config(directory)
    backend = backend_for(config, dtype)
    model = load_model(directory, config, backend=backend, dtype=dtype, device="cpu", load_format=load_format)
    driver = PagedDriver(model, backend, dtype)
    pieces = [TOKENS[:9], TOKENS[9:18], TOKENS[18:19], TOKENS[19:]]
    return model, torch.cat([driver.step({"r": piece})["r"] for piece in pieces])


Maker = Callable[[Path], Pair]
CHECKPOINTS: dict[str, Maker] = {
    "llama-blocks": lambda path: save_fp8("Llama", path, by_block, DEEPSEEK, scale_name="weight_scale_inv"),
    "deepseek-blocks": lambda path: save_fp8("DeepseekV3", path, by_block, DEEPSEEK, scale_name="weight_scale_inv"),
    "deepseek-v32-blocks": lambda path: save_fp8(
        "DeepseekV32", path, by_block, DEEPSEEK, scale_name="weight_scale_inv"
    ),
    "mixtral-blocks": lambda path: save_fp8("Mixtral", path, by_block, DEEPSEEK, scale_name="weight_scale_inv"),
    "qwen2-moe-blocks": lambda path: save_fp8("Qwen2Moe", path, by_block, DEEPSEEK, scale_name="weight_scale_inv"),
    "deepseek-compressed-blocks": lambda path: save_fp8(
        "DeepseekV3", path, by_block, COMPRESSED_BLOCKS, scale_name="weight_scale"
    ),
    "llama-tensors": lambda path: save_fp8("Llama", path, by_tensor, AUTO_DYNAMIC, scale_name="weight_scale"),
    "llama-tensors-static": lambda path: save_fp8(
        "Llama", path, by_tensor, AUTO_FP8, scale_name="weight_scale", input_scale=0.02
    ),
    "llama-channels": lambda path: save_fp8("Llama", path, by_channel, COMPRESSED_DYNAMIC, scale_name="weight_scale"),
    "phi3-tensors": lambda path: save_fp8("Phi3", path, by_tensor, AUTO_DYNAMIC, scale_name="weight_scale"),
    "phi3-blocks": lambda path: save_fp8("Phi3", path, by_block, DEEPSEEK, scale_name="weight_scale_inv"),
    "starcoder2-channels": lambda path: save_fp8(
        "Starcoder2", path, by_channel, COMPRESSED_DYNAMIC, scale_name="weight_scale"
    ),
    "llama-blocks-but-one": lambda path: save_fp8(
        "Llama",
        path,
        by_block,
        DEEPSEEK | SECOND_LAYER,
        scale_name="weight_scale_inv",
        left_out=("model.layers.1.self_attn.",),
    ),
    "qwen2-moe-blocks-but-a-layer-by-its-publisher-s-name": lambda path: save_fp8(
        "Qwen2Moe",
        path,
        by_block,
        DEEPSEEK | {"modules_to_not_convert": ["model.layers.0.mlp.shared_expert"]},
        scale_name="weight_scale_inv",
        left_out=("model.layers.0.mlp.shared_expert.",),
    ),
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return CHECKPOINTS[request.param](tmp_path_factory.mktemp("fp8"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return CHECKPOINTS["llama-blocks"](tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return CHECKPOINTS["deepseek-blocks"](tmp_path_factory.mktemp("deepseek"))


def test_logits_equal_those_of_the_dequantized_weights(pair: Pair) -> None:
    with torch.inference_mode():
        expected = pair.reference(torch.tensor([TOKENS])).logits[0]
    assert float(expected.std()) > 0.1
    torch.testing.assert_close(loaded(pair.quantized)[1], expected, rtol=1e-4, atol=1e-4)


def test_weights_stay_in_fp8_and_all_else_does_not(deepseek: Pair) -> None:
    model, _ = loaded(deepseek.quantized, dtype="bfloat16")
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            assert module.gate_up_proj.dtype == module.down_proj.dtype == E4M3
        elif isinstance(module, Linear):
            keeps = path == "lm_head" or path.endswith("kv_b_proj")  # MLA absorbs this one
            assert module.weight.dtype == (torch.bfloat16 if keeps else E4M3), path
    others = [name for name, parameter in model.named_parameters() if parameter.dtype not in (E4M3, torch.bfloat16)]
    assert all(name.endswith(("scale_inv", "gate.weight", "correction_bias")) for name in others)


def test_no_weight_is_allocated_twice(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the model is built, the weights that fp8 replaces have no memory, and none is left without."""
    seen: list[torch.device] = []
    made = Fp8Linear.__init__

    def watch(self: Fp8Linear, replaced: Linear, *args: object, **kwargs: object) -> None:
        seen.append(replaced.weight.device)
        made(self, replaced, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Fp8Linear, "__init__", watch)
    model, _ = loaded(llama.quantized)
    assert {device.type for device in seen} == {"meta"}
    assert len(seen) == 4 * 2
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_bfloat16_is_as_near_as_the_dequantized_checkpoint_in_bfloat16(llama: Pair) -> None:
    with torch.inference_mode():
        expected = llama.reference(torch.tensor([TOKENS])).logits[0]
    ours, theirs = (loaded(path, dtype="bfloat16")[1] for path in (llama.quantized, llama.plain))
    assert float((ours - expected).std()) <= 1.05 * float((theirs - expected).std())


def test_one_input_scale_serves_a_fused_layer_the_largest(tmp_path: Path) -> None:
    static = CHECKPOINTS["llama-tensors-static"](tmp_path)

    def raise_one(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.k_proj.input_scale"] = torch.tensor([0.05])

    rewrite(static.quantized, raise_one)
    layer = loaded(static.quantized)[0].get_submodule("model.layers.0.self_attn.qkv_proj")
    assert isinstance(layer, Fp8Linear)
    assert layer.input_scale is not None
    assert float(layer.input_scale) == pytest.approx(0.05)


@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_dummy_weights_keep_activations_sane(family: str, request: pytest.FixtureRequest) -> None:
    pair: Pair = request.getfixturevalue(family)
    first, logits = loaded(pair.quantized, load_format="dummy")
    second, again = loaded(pair.quantized, load_format="dummy")
    assert torch.equal(logits, again)
    assert 0.05 < float(logits.std()) < 5
    layers = [module for module in first.modules() if isinstance(module, Fp8Linear) and module.scale_RC is not None]
    weights = [layer.dequantized(torch.float32) for layer in layers]
    assert all(0.015 < float(weight.std()) < 0.025 for weight in weights)
    assert [parameter.dtype for parameter in first.parameters()] == [one.dtype for one in second.parameters()]


# ---- refusals


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.experts.2.down_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{Q}.weight_scale_inv"), rf"1 missing: {Q}\.weight_scale_inv"),
        (
            lambda tensors: tensors.update({f"{Q}.weight_scale_inv": torch.ones(2, 3)}),
            rf"1 unfit: {Q}\.weight_scale_inv in .* is \[2, 3\], the config needs \[2, 2\]",
        ),
        (
            lambda tensors: tensors.update({f"{Q}.weight": tensors[f"{Q}.weight"].bfloat16()}),
            rf"1 unfit: {Q}\.weight in .* is BF16, the quantization_config needs F8_E4M3",
        ),
        (
            lambda tensors: tensors.update({f"{Q}.weight": tensors[f"{Q}.weight"].float().to(torch.float8_e5m2)}),
            rf"1 unfit: {Q}\.weight in .* is F8_E5M2, the quantization_config needs F8_E4M3",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(E4M3)}),
            r"1 unfit: lm_head\.weight in .* is F8_E4M3, known are F64, F32",
        ),
        (
            lambda tensors: tensors.update({f"{Q}.input_scale": torch.ones(())}),
            rf"1 unexpected: {Q}\.input_scale",
        ),
        (
            lambda tensors: tensors[f"{Q}.weight_scale_inv"].view(-1)[1].fill_(torch.nan),
            rf"scales are not all finite numbers above 0: {Q}\.weight_scale_inv",
        ),
        (lambda tensors: tensors[f"{Q}.weight_scale_inv"].view(-1)[0].zero_(), "above 0"),
    ],
)
def test_wrong_scales_and_weights_are_refused(
    llama: Pair, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    copy = copied(llama.quantized, tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        loaded(rewrite(copy, change))
    assert "\n" not in str(caught.value)


def test_wrong_scales_of_experts_are_refused(deepseek: Pair, tmp_path: Path) -> None:
    missing = copied(deepseek.quantized, tmp_path / "missing")
    with pytest.raises(ConfigError, match=rf"1 missing: {DOWN}\.weight_scale_inv"):
        loaded(rewrite(missing, lambda tensors: tensors.pop(f"{DOWN}.weight_scale_inv")))
    negative = copied(deepseek.quantized, tmp_path / "negative")
    with pytest.raises(ConfigError, match=rf"above 0: {DOWN}\.weight_scale_inv"):
        loaded(rewrite(negative, lambda tensors: tensors[f"{DOWN}.weight_scale_inv"].neg_()))


def test_half_a_fused_layer_and_experts_with_one_scale_are_refused(llama: Pair, deepseek: Pair, tmp_path: Path) -> None:
    half = with_quantization(llama, tmp_path / "half", DEEPSEEK | {"modules_to_not_convert": ["k_proj"]})
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.k_proj is left out of the quantization") as caught:
        loaded(half)
    assert caught.value.field == "quantization_config"
    tensors = with_quantization(deepseek, tmp_path / "experts", AUTO_DYNAMIC)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts has one scale per tensor; allowed: .* 128 by 128"):
        loaded(tensors)


def copied(source: Path, target: Path) -> Path:
    target.mkdir(exist_ok=True, parents=True)
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def with_quantization(pair: Pair, directory: Path, quantization: Mapping[str, object]) -> Path:
    path = copied(pair.quantized, directory) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": dict(quantization)}))
    return directory


def test_batch_invariance_reaches_fp8_layers(llama: Pair) -> None:
    config = read_config(llama.quantized)
    model = load_model(
        llama.quantized,
        config,
        backend=backend_for(config),
        dtype="float32",
        device="cpu",
        batch_invariant=True,
    )
    layers = [module for module in model.modules() if isinstance(module, Fp8Linear)]
    assert all(layer.batch_invariant for layer in layers)
    x_TK = torch.randn(7, 160)
    together = layers[0](x_TK)
    assert all(torch.equal(layers[0](x_TK[row : row + 1])[0], together[row]) for row in range(7))
