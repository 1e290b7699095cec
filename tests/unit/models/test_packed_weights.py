"""Checkpoints in packed integers, int8 and mxfp4: the whole model's logits equal those of the same model with the
weights that the numbers mean, for every published packing; what cannot be right is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear

from baton.core.errors import ConfigError
from baton.kvcache.cache import TORCH_DTYPES
from baton.models.families.moe.gpt_oss import Mxfp4Experts
from baton.models.families.reader import read_config
from baton.models.formats.mxfp4 import check_scales, dequantize
from baton.models.kernels.quantized.packed_gemm import Product
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.linear import Linear
from baton.models.loading.identity import config_digest, model_identity
from baton.models.loading.loader import load_model
from baton.models.quantization.int8_linear import Int8Linear
from baton.models.quantization.packed_experts import PackedExperts
from baton.models.quantization.packed_linear import PackedLinear
from tests.unit.models.fp8_checkpoints import VOCAB_SIZE, Pair
from tests.unit.models.packed_checkpoints import (
    AWQ_CONFIG,
    gptq_config,
    int8_config,
    packed_config,
    save_gpt_oss,
    save_packed,
)
from tests.unit.models.paged import PagedDriver, backend_for

TOKENS = torch.randint(VOCAB_SIZE, (12,), generator=torch.Generator().manual_seed(0)).tolist()

Maker = Callable[[Path], Pair]
CHECKPOINTS: dict[str, Maker] = {
    "gptq": lambda path: save_packed("Llama", path, gptq_config()),
    "gptq asymmetric reordered": lambda path: save_packed("Llama", path, gptq_config(sym=False, desc_act=True)),
    "gptq v2 8 bits by channel": lambda path: save_packed(
        "Llama", path, gptq_config(sym=False, bits=8, group_size=-1, checkpoint_format="gptq_v2")
    ),
    "gptq experts reordered": lambda path: save_packed("DeepseekV3", path, gptq_config(desc_act=True)),
    "awq": lambda path: save_packed("Llama", path, AWQ_CONFIG),
    "awq experts but one layer": lambda path: save_packed(
        "DeepseekV3",
        path,
        AWQ_CONFIG | {"modules_to_not_convert": ["model.layers.0"]},
        left_out=("model.layers.0.",),
    ),
    "w4a16": lambda path: save_packed("Llama", path, packed_config()),
    "w4a16 asymmetric reordered": lambda path: save_packed(
        "Llama", path, packed_config(symmetric=False, actorder="group")
    ),
    "w4a16 experts by their publisher's names": lambda path: save_packed("Mixtral", path, packed_config()),
    "w8a16 by channel": lambda path: save_packed("Llama", path, packed_config(num_bits=8, strategy="channel")),
    "w8a8 dynamic": lambda path: save_packed("Llama", path, int8_config(static=False)),
    "w8a8 static": lambda path: save_packed("Llama", path, int8_config(static=True)),
    "mxfp4": save_gpt_oss,
}
QUANTIZED = (PackedLinear, PackedExperts, Int8Linear, Mxfp4Experts)


def loaded(directory: Path, **options: Any) -> tuple[CausalLM, Tensor]:
    config = read_config(directory)
    options = {"dtype": "float32", **options}
    backend = backend_for(config, options["dtype"])
    model = load_model(directory, config, backend=backend, device="cpu", **options)
    driver = PagedDriver(model, backend, options["dtype"])
    return model, torch.cat([driver.step({"r": piece})["r"] for piece in (TOKENS[:9], TOKENS[9:11], TOKENS[11:])])


@pytest.fixture(scope="module", params=CHECKPOINTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return CHECKPOINTS[request.param](tmp_path_factory.mktemp("packed"))


@pytest.fixture(scope="module")
def gptq(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return CHECKPOINTS["gptq"](tmp_path_factory.mktemp("gptq"))


def test_logits_equal_those_of_the_weights_that_the_numbers_mean(pair: Pair) -> None:
    model, logits = loaded(pair.quantized)
    expected = loaded(pair.plain)[1]
    assert float(expected.std()) > 0.1
    assert any(isinstance(module, QUANTIZED) for module in model.modules())
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_a_gpus_products_are_those_of_the_dequantized_weights(pair: Pair) -> None:
    """On a CPU layers multiply their dequantized weights, so that the kernels' view of a file is seen only here."""
    model, _ = loaded(pair.quantized)
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    for weight in (weight for layer in layers for weight in layer.weights):
        x_TK = torch.randn(3, weight.columns)
        expected = linear(x_TK, weight.dequantized(torch.float32))
        actual = Product.of(weight)(x_TK, None, batch_invariant=False)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_linear_weights_stay_packed(gptq: Pair) -> None:
    model, _ = loaded(gptq.quantized, dtype="bfloat16")
    layers = {path: module for path, module in model.named_modules() if isinstance(module, Linear)}
    assert all((layer.weight.dtype == torch.uint8) is (path != "lm_head") for path, layer in layers.items())
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_random_weights_keep_activations_sane(pair: Pair) -> None:
    first, second = (loaded(pair.quantized, load_format="dummy")[1] for _ in range(2))
    assert torch.equal(first, second)
    assert 0.05 < float(first.std()) < 5


def test_batch_invariance_reaches_quantized_layers(pair: Pair) -> None:
    model, logits = loaded(pair.quantized, batch_invariant=True)
    assert all(module.batch_invariant for module in model.modules() if isinstance(module, QUANTIZED))
    torch.testing.assert_close(logits, loaded(pair.plain)[1], rtol=1e-4, atol=1e-4)


def test_two_packings_of_one_model_are_two_models(gptq: Pair, tmp_path: Path) -> None:
    others = [gptq.plain, CHECKPOINTS["awq"](tmp_path).quantized]
    identities = [model_identity(path, read_config(path)) for path in (gptq.quantized, *others)]
    assert len({identity.config_digest for identity in identities}) == 3
    assert len({identity.weights_digest for identity in identities}) == 3


# ---- what a checkpoint may have besides, and refusals


def rewritten(source: Path, target: Path, change: Callable[[dict[str, Tensor]], object], **quantization: Any) -> Path:
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    values = json.loads((source / "config.json").read_text())
    values["quantization_config"] |= quantization
    (target / "config.json").write_text(json.dumps(values))
    return target


O = "model.layers.0.self_attn.o_proj"  # noqa: E741
DOWN = "model.layers.0.mlp.down_proj"


def test_biases_of_zeros_and_missing_groups_change_nothing(gptq: Pair, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{DOWN}.bias"] = torch.zeros(64, dtype=torch.float16)
        del tensors[f"{DOWN}.g_idx"]

    expected = loaded(gptq.quantized)[1]
    assert torch.equal(loaded(rewritten(gptq.quantized, tmp_path / "zeros", change))[1], expected)


@pytest.mark.parametrize(
    ("change", "quantization", "message"),
    [
        (lambda tensors: tensors.update({f"{DOWN}.bias": torch.ones(64)}), {}, rf"1 unexpected: {DOWN}\.bias"),
        (lambda tensors: tensors.pop(f"{O}.qzeros"), {}, rf"1 missing: {O}\.qzeros"),
        (lambda tensors: None, {"group_size": 64}, r"unfit: .*qzeros in .* is \[2, 8\], the config needs \[1, 8\]"),
        (lambda tensors: None, {"bits": 8}, r"unfit: .*qweight in .* is \[8, 64\], the config needs \[16, 64\]"),
        (
            lambda tensors: tensors.update({f"{O}.qweight": tensors[f"{O}.qweight"].float()}),
            {},
            rf"{O}\.qweight in .* is F32, the quantization_config needs I32",
        ),
        (lambda tensors: tensors.pop(f"{O}.g_idx"), {"desc_act": True}, rf"1 missing: {O}\.g_idx"),
        (
            lambda tensors: tensors.update({f"{O}.scales": tensors[f"{O}.scales"].repeat(2, 1)}),
            {"desc_act": True},
            rf"{O}\.scales in .* is \[4, 64\], the config needs \[2, 64\]",
        ),
        (
            lambda tensors: tensors[f"{O}.g_idx"].fill_(2),
            {},
            rf"{O}\.g_idx .* 0 to 1",
        ),
        (
            lambda tensors: tensors[f"{O}.scales"].view(-1)[3].fill_(torch.inf),
            {},
            rf"{O}\.scales .* finite",
        ),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(
    gptq: Pair,
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], object],
    quantization: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(rewritten(gptq.quantized, tmp_path / "changed", change, **quantization))


@pytest.mark.parametrize(
    ("scale", "dtype", "meaning"),
    [
        (255, "float32", "255, which is NaN; allowed: 0 to 252"),
        (254, "bfloat16", r"254, which is 2\^127, too large for bfloat16; allowed: 0 to 252"),
        (253, "float32", r"253, which is 2\^126, too large for float32; allowed: 0 to 252"),
        (141, "float16", r"141, which is 2\^14, too large for float16; allowed: 0 to 140"),
    ],
)
def test_scales_with_which_numbers_are_not_finite_are_refused(
    tmp_path: Path, scale: int, dtype: str, meaning: str
) -> None:
    name = "model.layers.1.mlp.experts.down_proj_scales"
    gpt_oss = save_gpt_oss(tmp_path).quantized

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[5] = scale

    with pytest.raises(ConfigError, match=rf"{name} has a scale of {meaning}"):
        loaded(rewritten(gpt_oss, tmp_path / "changed", change), dtype=dtype)


def test_the_largest_scale_that_is_allowed_is_finite(tmp_path: Path) -> None:
    for dtype, scale in (("float32", 252), ("bfloat16", 252), ("float16", 140)):
        blocks, scales = torch.arange(256, dtype=torch.uint8).view(1, 16, 16), torch.full((1, 16), scale)
        numbers = dequantize(blocks, scales, dtype=TORCH_DTYPES[dtype])
        assert bool(numbers.isfinite().all())
        check_scales("scales", scales, dtype=TORCH_DTYPES[dtype])


def test_digests_differ_between_schemes(tmp_path: Path, gptq: Pair) -> None:
    def digest(**quantization: Any) -> str:
        values = json.loads((gptq.quantized / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(values | {"quantization_config": quantization}))
        return config_digest(read_config(tmp_path))

    configs = [
        gptq_config(),
        gptq_config(sym=False),
        gptq_config(desc_act=True),
        gptq_config(checkpoint_format="gptq_v2"),
        AWQ_CONFIG,
        packed_config(),
        int8_config(static=True),
        int8_config(static=False),
    ]
    assert len({digest(**config) for config in configs}) == len(configs)
