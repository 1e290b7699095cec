"""A norm or an activation that quantizes for the next layer leaves the bits of separate kernels, and does so only for a
layer that reads them.

Legend: T tokens, D channels, I channels of an MLP.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.models.config.quantization.config import Fp8Config, Granularity
from baton.models.config.quantization.int8_config import Int8Config
from baton.models.families.dense.gemma import GemmaRMSNorm
from baton.models.formats import fp8
from baton.models.kernels import activation, norms
from baton.models.kernels.quantized import fp8_quantize, int8_gemm
from baton.models.kernels.quantized.rows import QuantizedRows, RowFormat, quantize
from baton.models.layers.linear import Linear
from baton.models.layers.mlp import GatedMLP, gelu_tanh_and_multiply
from baton.models.layers.norms import RMSNorm
from baton.models.quantization import fp8_linear
from baton.models.quantization.fp8_linear import Fp8Linear
from baton.models.quantization.int8_linear import Int8Linear
from tests.device import DEVICE
from tests.unit.models.test_fp8_weights import CHECKPOINTS, loaded

# numpy's: infinity is what is meant.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Larger than some activations, so these saturate.
GIVEN = torch.tensor(0.004, device=DEVICE)
FORMATS = {
    "blocks": RowFormat(fp8.E4M3, blocked=True),
    "padded-blocks": RowFormat(fp8.E4M3, blocked=True, multiple_of=4),
    "blocks-by-powers": RowFormat(fp8.E4M3, blocked=True, power_of_two=True),
    "tokens": RowFormat(fp8.E4M3),
    "tokens-by-powers": RowFormat(fp8.E4M3, power_of_two=True),
    "given": RowFormat(fp8.E4M3, scale=GIVEN),
    "int8": RowFormat(torch.int8),
    "int8-given": RowFormat(torch.int8, scale=GIVEN),
}
by_format = pytest.mark.parametrize("row_format", FORMATS.values(), ids=FORMATS)
# (tokens, channels): less than a block, whole ones and a part of one, more than one tile of an activation.
SHAPES = ((0, 300), (1, 16), (2, 100), (3, 2200), (7, 300))


def rows(num_tokens: int, size: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes, one of them only zeros, between columns of NaN, which must not be read."""
    sizes_T1 = torch.tensor([1.0, 1e-3, 3e3, 0.0, 1e-6, 7.0]).repeat(num_tokens)[:num_tokens, None]
    wide = torch.full((num_tokens, size + 8), torch.nan)
    wide[:, 2 : size + 2] = torch.randn(num_tokens, size) * sizes_T1
    return wide.to(DEVICE, dtype)[:, 2 : size + 2]


def separately(x_TD: Tensor, row_format: RowFormat) -> tuple[Tensor, Tensor]:
    """By the kernels of `fp8_quantize` and `int8_gemm`, interpreted where there is no GPU."""
    if row_format.dtype is torch.int8:
        return int8_gemm.quantize_tokens(x_TD, row_format.scale)
    if row_format.blocked:
        return fp8_quantize.launch_blocks(
            x_TD, power_of_two=row_format.power_of_two, multiple_of=row_format.multiple_of
        )
    return fp8_quantize.launch_tokens(x_TD, row_format.scale, power_of_two=row_format.power_of_two)


def assert_same(ours: QuantizedRows, x_TD: Tensor, row_format: RowFormat) -> None:
    stored_PD, scale_PC = separately(x_TD, row_format)
    assert ours.stored_PK.dtype is stored_PD.dtype
    assert torch.equal(ours.stored_PK.view(torch.uint8), stored_PD.view(torch.uint8))
    assert torch.equal(ours.scale_PC, scale_PC)
    assert len(scale_PC) <= 1 or ours.scale_PC.stride(0) == scale_PC.stride(0) == 1
    assert (ours.num_tokens, ours.dtype) == (len(x_TD), x_TD.dtype)


def norm_of(kind: type[RMSNorm], size: int, dtype: torch.dtype) -> RMSNorm:
    norm = kind(size, eps=1e-5, dtype=dtype).to(DEVICE).requires_grad_(requires_grad=False)
    norm.weight.uniform_(0.3, 1.5)
    return norm


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ---- kernels


@by_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "size"), SHAPES)
def test_a_norm_quantizes_to_the_bits_of_separate_kernels(
    tokens: int, size: int, dtype: torch.dtype, row_format: RowFormat
) -> None:
    norm, x_TD = norm_of(RMSNorm, size, dtype), rows(tokens, size, dtype)
    ours = norms.norm_and_quantize(x_TD, None, norm, row_format)
    assert_same(ours, norms.rms_norm(x_TD, norm), row_format)


@by_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_update_norm", [False, True])
def test_an_addition_and_norm_quantize_to_the_bits_of_separate_kernels(
    with_update_norm: bool, dtype: torch.dtype, row_format: RowFormat
) -> None:
    norm = norm_of(GemmaRMSNorm, 300, dtype)
    update_norm = norm_of(GemmaRMSNorm, 300, dtype) if with_update_norm else None
    update_TD, stream_TD = rows(5, 300, dtype), rows(5, 300, dtype)
    separate_TD = stream_TD.clone()
    ours = norms.norm_and_quantize(stream_TD, update_TD, norm, row_format, update_norm=update_norm)
    normed_TD = norms.add_rms_norm(separate_TD, update_TD, norm, update_norm=update_norm)
    assert torch.equal(stream_TD, separate_TD)
    assert_same(ours, normed_TD, row_format)


@by_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "size"), SHAPES)
def test_an_activation_quantizes_to_the_bits_of_separate_kernels(
    tokens: int, size: int, dtype: torch.dtype, row_format: RowFormat
) -> None:
    gate_up_TI = rows(tokens, 2 * size, dtype)
    gate_up_TI.clamp_(-60, 60)  # float16 holds their products
    kernel, tanh_gelu = ((activation.silu_and_multiply, False), (activation.gelu_tanh_and_multiply, True))[tokens % 2]
    ours = activation.activate_and_quantize(gate_up_TI, row_format, tanh_gelu=tanh_gelu)
    assert_same(ours, kernel(gate_up_TI), row_format)


@by_format
def test_forty_tokens_have_the_bits_of_separate_kernels(row_format: RowFormat) -> None:
    norm, x_TD = norm_of(RMSNorm, 140, torch.bfloat16), rows(40, 140, torch.bfloat16)
    assert_same(norms.norm_and_quantize(x_TD, None, norm, row_format), norms.rms_norm(x_TD, norm), row_format)
    gate_up_TI = rows(40, 280, torch.bfloat16)
    ours = activation.activate_and_quantize(gate_up_TI, row_format, tanh_gelu=False)
    assert_same(ours, activation.silu_and_multiply(gate_up_TI), row_format)


@pytest.mark.parametrize("name", ["tokens", "int8", "blocks"])
def test_rows_that_no_program_holds_are_quantized_by_a_kernel_of_their_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation, "_MOST_CHANNELS", 200)
    gate_up_TI = rows(3, 600, torch.bfloat16)
    ours = activation.activate_and_quantize(gate_up_TI, FORMATS[name], tanh_gelu=False)
    assert_same(ours, activation.silu_and_multiply(gate_up_TI), FORMATS[name])


# ---- layers

KINDS: dict[str, Fp8Config | Int8Config] = {
    "blocks": Fp8Config(Granularity.BLOCK, False, power_of_two_inputs=True),
    "channels": Fp8Config(Granularity.CHANNEL, False),
    "given": Fp8Config(Granularity.TENSOR, True),
    "int8": Int8Config("int8", by_channel=True, static_inputs=False),
}
by_kind = pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
QuantizedLinear = Fp8Linear | Int8Linear


@pytest.fixture
def _with_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_linear, "multiplies_fp8", lambda device: True)


def quantized(replaced: Linear, config: Fp8Config | Int8Config) -> QuantizedLinear:
    layer: QuantizedLinear
    if isinstance(config, Int8Config):
        layer = Int8Linear(replaced, "down_proj", config, device=DEVICE)
    else:
        layer = Fp8Linear(replaced, "down_proj", config, device=DEVICE)
    layer.requires_grad_(requires_grad=False)
    layer.weight.copy_(torch.randn(layer.weight.shape) * 60)
    for _, scale, input_scale in layer.checkpoint_scales():
        scale.fill_(0.0003)
        if input_scale is not None:
            input_scale.fill_(0.004)
    layer.finish()
    if isinstance(layer, Int8Linear) and layer._arrived is None:  # this machine has no GPU
        layer._arrived = torch.zeros(int8_gemm.num_counters(layer.out_features), dtype=torch.int32)
    return layer


def mlp_of(config: Fp8Config | Int8Config) -> GatedMLP:
    mlp = GatedMLP(288, 336, dtype=torch.bfloat16)
    mlp.gate_up_proj = quantized(mlp.gate_up_proj, config)
    mlp.down_proj = quantized(mlp.down_proj, config)
    return mlp


@by_kind
@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.usefixtures("_with_products")
def test_a_norm_and_a_gated_mlp_leave_the_bits_of_separate_kernels(
    is_gelu: bool, config: Fp8Config | Int8Config
) -> None:
    mlp, norm = mlp_of(config), norm_of(RMSNorm, 288, torch.bfloat16)
    mlp.activate = gelu_tanh_and_multiply if is_gelu else mlp.activate
    kernel = activation.gelu_tanh_and_multiply if is_gelu else activation.silu_and_multiply
    stream_TD, update_TD = rows(5, 288, torch.bfloat16), rows(5, 288, torch.bfloat16)
    separate_TD = stream_TD.clone()
    normed = norm.add_and_norm_for(mlp, stream_TD, update_TD)
    assert isinstance(normed, QuantizedRows)
    normed_TD = norms.add_rms_norm(separate_TD, update_TD, norm)
    assert torch.equal(stream_TD, separate_TD)
    assert torch.equal(mlp(normed), mlp.down_proj(kernel(mlp.gate_up_proj(normed_TD))))


def refuse_by_adapters(layer: QuantizedLinear) -> None:
    layer.has_adapters = True


def refuse_by_invariance(layer: QuantizedLinear) -> None:
    layer.batch_invariant = True


def refuse_by_dequantizing(layer: QuantizedLinear) -> None:
    layer.dequantize_()


@by_kind
@pytest.mark.parametrize("refuse", [refuse_by_adapters, refuse_by_invariance, refuse_by_dequantizing])
@pytest.mark.usefixtures("_with_products")
def test_a_layer_gets_a_tensor_where_it_needs_one(
    refuse: Callable[[QuantizedLinear], None], config: Fp8Config | Int8Config
) -> None:
    mlp, norm = mlp_of(config), norm_of(RMSNorm, 288, torch.bfloat16)
    gate_up_TI = rows(3, 2 * 336, torch.bfloat16)
    assert isinstance(norm.add_and_norm_for(mlp, rows(3, 288, torch.bfloat16), None), QuantizedRows)
    assert isinstance(mlp._activated(gate_up_TI), QuantizedRows)
    for layer in (mlp.gate_up_proj, mlp.down_proj):
        assert isinstance(layer, QuantizedLinear)
        refuse(layer)
    assert isinstance(norm.add_and_norm_for(mlp, rows(3, 288, torch.bfloat16), None), Tensor)
    assert isinstance(mlp._activated(gate_up_TI), Tensor)


def test_layers_without_products_in_fp8_and_other_modules_get_tensors() -> None:
    norm, x_TD = norm_of(RMSNorm, 288, torch.bfloat16), rows(3, 288, torch.bfloat16)
    plain = GatedMLP(288, 336, dtype=torch.bfloat16)
    for reader in (plain, plain.gate_up_proj, torch.nn.Identity()):
        assert isinstance(norm.add_and_norm_for(reader, x_TD, None), Tensor)


# ---- a whole model

# Launches that only quantize, in a step of two layers, fused and separate. Before the output of attention is projected
# there always is one. Shared experts read what the router reads. An indexer reads what two projections read, and has
# two of its own.
LAUNCHES = [
    ("llama-blocks", 1 + 1, 4 + 4),
    ("llama-channels", 1 + 1, 4 + 4),
    ("llama-tensors-static", 1 + 1, 4 + 4),
    ("deepseek-blocks", 1 + 2, 5 + 4),
    ("deepseek-v32-blocks", 5 + 6, 7 + 6),
]


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu/test_fp8.py runs whole models")
@pytest.mark.parametrize(("name", "fused", "separate"), LAUNCHES, ids=lambda value: str(value))
def test_few_layers_quantize_by_a_kernel_of_their_own(
    name: str, fused: int, separate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_linear, "multiplies_fp8", lambda device: True)
    pair, counts, logits = CHECKPOINTS[name](tmp_path), [], []
    seen: list[int] = []

    def count(x_TK: Tensor, row_format: RowFormat) -> QuantizedRows:
        seen.append(len(x_TK))
        return quantize(x_TK, row_format)

    monkeypatch.setattr(fp8_linear, "quantize", count)
    for _ in range(2):
        seen.clear()
        logits.append(loaded(pair.quantized)[1])
        counts.append(len(seen))
        monkeypatch.setattr(Fp8Linear, "row_format", lambda layer, num_tokens: None)
    steps = 4
    assert counts == [fused * steps, separate * steps]
    # torch's norms, which run on a CPU without fusing, add up in another order.
    assert float((logits[0] - logits[1]).std()) < 0.02 * float(logits[1].std())
