"""The product for few rows and weights of 8 bits on a GPU, at the shapes of served models: near the kernel for any
rows, the same bits every time, captured in a chain or one by one."""

import pytest
import torch
from torch import Tensor

from models.kernels import fp8_gemm, fp8_quantize, int8_gemm
from models.kernels.decode_matmul_8bit import multiply
from models.kernels.fp8_gemm import Weight
from models.linear import Linear
from models.quantization import fp8
from models.quantization.int8_config import Int8Config
from models.quantization.int8_linear import Int8Linear
from tritonlib import launch

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
# Llama-8B's qkv, o, gate_up and down, DeepSeek-V3's inputs of attention, and rows and channels that no tile divides.
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (2112, 7168), (4136, 4112)]
TOKENS = [1, 3, 8, 16, 17, 32]
LAYER = [(6144, 4096), (4096, 6144), (28672, 4096), (4096, 28672)]


def weight_of(rows: int, channels: int, *, rows_per_scale: int = 128, seed: int = 0) -> Weight:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    columns = 1 if rows_per_scale == 1 else -(-channels // 128)
    stored_NK = torch.randn(rows, channels, device=DEVICE, generator=generator).mul_(60).clamp_(-448, 448)
    scale_RC = torch.rand(-(-rows // rows_per_scale), columns, device=DEVICE, generator=generator) + 0.5
    arrived = torch.zeros(fp8_gemm.num_counters(rows), dtype=torch.int32, device=DEVICE)
    return Weight(stored_NK.to(fp8.E4M3), scale_RC / 60 * channels**-0.5, rows_per_scale, None, arrived)


def of_any_rows(x_TK: Tensor, weight: Weight) -> Tensor:
    """By the kernels for any rows, in float32."""
    quantize = fp8_quantize.quantize_tokens if weight.rows_per_scale == 1 else fp8_quantize.quantize_blocks
    return fp8_gemm.multiply(*quantize(x_TK), weight, dtype=torch.float32, batch_invariant=False)


def of_few_rows(x_TK: Tensor, weight: Weight, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    if weight.rows_per_scale == 1:
        return multiply(*fp8_quantize.quantize_tokens(x_TK), weight, dtype=dtype)
    return multiply(x_TK, None, weight, dtype=dtype)


@pytest.mark.parametrize("rows_per_scale", [128, 64, 1])
@pytest.mark.parametrize(("rows", "channels"), SHAPES)
def test_products_are_those_of_the_kernel_for_any_rows(rows: int, channels: int, rows_per_scale: int) -> None:
    weight = weight_of(rows, channels, rows_per_scale=rows_per_scale)
    for num_tokens in TOKENS:
        # Rows of a wider matrix, as after a fused projection.
        x_TK = torch.randn(num_tokens, channels + 64, device=DEVICE, dtype=torch.bfloat16)[:, :channels]
        expected_TN = of_any_rows(x_TK, weight)
        out_TN = of_few_rows(x_TK, weight, dtype=torch.float32)
        # Both add up the same sums of 128 products, in another order.
        torch.testing.assert_close(out_TN, expected_TN, rtol=1e-4, atol=1e-4 * float(expected_TN.std()))
        assert not weight.arrived.any(), num_tokens


@pytest.mark.parametrize(("rows", "channels"), SHAPES)
def test_integers_have_the_bits_of_the_kernel_for_any_rows(rows: int, channels: int) -> None:
    weight_NK = torch.randint(-127, 128, (rows, channels), dtype=torch.int8, device=DEVICE)
    scale_N = torch.rand(rows, device=DEVICE)
    arrived = torch.zeros(int8_gemm.num_counters(rows), dtype=torch.int32, device=DEVICE)
    weight = Weight(weight_NK, scale_N[:, None], 1, None, arrived)
    for num_tokens in TOKENS:
        x_TK = torch.randn(num_tokens, channels, device=DEVICE, dtype=torch.bfloat16)
        quantized = int8_gemm.quantize_tokens(x_TK, None)
        expected_TN = int8_gemm.multiply(
            *quantized, weight_NK, scale_N, None, arrived, dtype=torch.bfloat16, num_sms=132
        )
        assert torch.equal(multiply(*quantized, weight, dtype=torch.bfloat16), expected_TN), num_tokens
        assert not arrived.any(), num_tokens


def test_a_layer_takes_it_for_few_rows_and_the_kernel_for_any_rows_for_more() -> None:
    replaced = Linear(4096, 6144, dtype=torch.bfloat16)
    config = Int8Config("int8", by_channel=True, static_inputs=False)
    layer = Int8Linear(replaced, "o_proj", config, device=DEVICE)
    layer.weight.random_(-127, 128)
    for _, scale, _ in layer.checkpoint_scales():
        scale.uniform_(0.01, 0.02)
    layer.finish()
    for num_tokens in (*TOKENS, 33):
        x_TK = torch.randn(num_tokens, 4096, device=DEVICE, dtype=torch.bfloat16)
        # Padding of the batch takes the other kernel.
        padded_TK = torch.cat([x_TK, x_TK.new_zeros(40, 4096)])
        assert torch.equal(layer(x_TK), layer(padded_TK)[:num_tokens]), num_tokens


@pytest.mark.parametrize(("rows", "channels"), SHAPES)
def test_the_same_call_has_the_same_bits(rows: int, channels: int) -> None:
    weight = weight_of(rows, channels)
    for num_tokens in (1, 16, 32):
        x_TK = torch.randn(num_tokens, channels, device=DEVICE, dtype=torch.bfloat16)
        first = of_few_rows(x_TK, weight)
        for _ in range(100):
            assert torch.equal(of_few_rows(x_TK, weight), first), num_tokens


@pytest.mark.parametrize("rows_per_scale", [128, 1])
@pytest.mark.parametrize("num_tokens", [1, 8, 16, 32])
def test_a_captured_chain_of_products_gives_the_bits_of_one_by_one(
    num_tokens: int, rows_per_scale: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each product reads the output of the one before it, while its own weights are being loaded."""
    weights = [weight_of(*shape, rows_per_scale=rows_per_scale, seed=seed) for seed, shape in enumerate(LAYER)]

    def chain(x_TK: Tensor) -> Tensor:
        for _ in range(4):
            for weight in weights:
                x_TK = of_few_rows(x_TK, weight)
        return x_TK

    x_TK = torch.randn(num_tokens, 4096, device=DEVICE, dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chain(x_TK)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out_TN = chain(x_TK)
    torch.cuda.synchronize()
    monkeypatch.setattr(launch, "_can_overlap", lambda device: False)
    for _ in range(20):
        x_TK.normal_()
        expected_TN = chain(x_TK)
        graph.replay()
        assert torch.equal(out_TN, expected_TN)
    assert bool(out_TN.isfinite().all())
    assert out_TN.float().std() > 0.1
    for weight in weights:
        assert not weight.arrived.any()
