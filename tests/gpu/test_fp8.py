"""Weights of 8 bits on a GPU: products at the shapes of served models equal their twin, a token's bits do not depend on
the batch where that is asked for, layers can be captured, and checkpoints and dummy weights get there fast."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from baton.models.checkpoint.checkpoint import read_checkpoint
from baton.models.checkpoint.tensor_reader import read_into
from baton.models.config.quantization.config import Fp8Config, Granularity
from baton.models.config.quantization.int8_config import Int8Config
from baton.models.formats import fp8
from baton.models.kernels.quantized import fp8_library, fp8_quantize
from baton.models.layers.linear import FusedLinear, Linear
from baton.models.loading.dummy import fill_at_random
from baton.models.quantization.fp8_linear import Fp8Linear, multiplies_fp8
from baton.models.quantization.int8_linear import Int8Linear
from baton.tritonlib import launch

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
# (parts, input channels): Llama-8B's qkv, o and down, DeepSeek-V3's inputs of attention, rows that no tile divides, and
# rows enough for tall tiles, one on a multiprocessor or two.
SHAPES = [
    ((4096, 1024, 1024), 4096),
    ((4096,), 4096),
    ((4096,), 14336),
    ((1536, 576), 7168),
    ((200, 100), 1104),
    ((6144, 6144), 1024),
    ((14336, 14336), 1024),
]
# The library's begin at 33 or 65, in fours: some are padded.
TOKENS = [1, 3, 16, 17, 32, 33, 64, 65, 100, 256, 257, 1000, 4096]
KINDS = [
    Fp8Config(Granularity.BLOCK, False),
    Fp8Config(Granularity.BLOCK, False, power_of_two_inputs=True),
    Fp8Config(Granularity.CHANNEL, False),
    Fp8Config(Granularity.TENSOR, True),
]


INT8 = Int8Config("int8", by_channel=True, static_inputs=False)


def layer_of(config: Fp8Config, parts: tuple[int, ...], channels: int, *, bias: bool = False) -> Fp8Linear:
    layer = Fp8Linear(plain_layer(parts, channels, bias=bias), "part0", config, device=DEVICE)
    fill(layer, largest=448)
    return layer


def int8_layer_of(parts: tuple[int, ...], channels: int) -> Int8Linear:
    layer = Int8Linear(plain_layer(parts, channels), "part0", INT8, device=DEVICE)
    fill(layer, largest=127)
    return layer


def plain_layer(parts: tuple[int, ...], channels: int, *, bias: bool = False) -> Linear:
    with DEVICE:
        if len(parts) == 1:
            return Linear(channels, parts[0], dtype=torch.bfloat16, bias=bias)
        named = tuple((f"part{index}", rows) for index, rows in enumerate(parts))
        return FusedLinear(channels, named, dtype=torch.bfloat16, bias=bias)


def fill(layer: Fp8Linear | Int8Linear, *, largest: int) -> None:
    torch.manual_seed(0)
    layer.requires_grad_(requires_grad=False)
    layer.weight.copy_((torch.randn(layer.weight.shape, device=DEVICE) * 60).clamp(-largest, largest))
    if layer.bias is not None:
        layer.bias.normal_()
    for index, (_, scale, input_scale) in enumerate(layer.checkpoint_scales()):
        scale.copy_((torch.rand(scale.shape) + 0.5) * 0.001 * (index + 1))
        if input_scale is not None:
            input_scale.fill_(0.02)
    layer.finish()


def twin(layer: Fp8Linear, x_TK: Tensor) -> Tensor:
    """float32, from activations as they are quantized."""
    power_of_two = layer.config.power_of_two_inputs
    if layer.config.weights is Granularity.BLOCK:
        stored_TK, scale_TC = fp8.quantize_blocks(x_TK, power_of_two=power_of_two)
        columns_TK = scale_TC.repeat_interleave(128, dim=1)[:, : x_TK.shape[1]]
    elif layer.input_scale is not None:
        stored_TK, columns_TK = fp8.quantize_static(x_TK, layer.input_scale)
    else:
        stored_TK, columns_TK = fp8.quantize_tokens(x_TK, power_of_two=power_of_two)
    out_TN = (stored_TK.double() * columns_TK.double()) @ layer.dequantized(torch.float32).double().T
    return out_TN if layer.bias is None else out_TN + layer.bias.double()


@pytest.mark.parametrize("config", KINDS, ids=lambda config: f"{config.weights}-{config.static_inputs}")
@pytest.mark.parametrize(("parts", "channels"), SHAPES)
def test_products_equal_the_twins(config: Fp8Config, parts: tuple[int, ...], channels: int) -> None:
    # With blocks, a bias keeps a layer from the library.
    has_bias = channels == 4096 and config.weights is not Granularity.BLOCK
    layer = layer_of(config, parts, channels, bias=has_bias)
    for tokens in TOKENS:
        x_TK = torch.randn(tokens, channels, device=DEVICE, dtype=torch.bfloat16)
        expected_TN = twin(layer, x_TK)
        # Sums of 128 products that keep 12 bits or more differ by up to 0.0018 deviations, and a token's by 0.0004 of
        # its norm; rounding to bfloat16 makes it 0.0021.
        allowed_TN = expected_TN.abs() * 2**-8 + 0.003 * expected_TN.std()
        for _ in range(2):
            error_TN = (layer(x_TK).double() - expected_TN).abs()
            assert float((error_TN / allowed_TN).max()) < 1, tokens
            assert float((error_TN.norm(dim=1) / expected_TN.norm(dim=1)).max()) < 0.003, tokens


@pytest.mark.parametrize("tokens", [1, 64, 66, 300])
def test_blocks_with_a_bias_equal_the_twin(tokens: int) -> None:
    layer = layer_of(KINDS[0], (4096, 1024, 1024), 4096, bias=True)
    x_TK = torch.randn(tokens, 4096, device=DEVICE, dtype=torch.bfloat16)
    expected_TN = twin(layer, x_TK)
    allowed_TN = expected_TN.abs() * 2**-8 + 0.003 * expected_TN.std()
    assert float(((layer(x_TK).double() - expected_TN).abs() / allowed_TN).max()) < 1


@pytest.mark.parametrize("config", KINDS[::2], ids=lambda config: str(config.weights))
def test_many_tokens_are_the_librarys_where_it_takes_them(config: Fp8Config) -> None:
    layer = layer_of(config, (1536, 576), 7168)
    x_TK = torch.randn(66, 7168, device=DEVICE, dtype=torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x_TK)
    by_library = "aten::_scaled_mm" in {event.key for event in profile.key_averages()}
    takes = config.weights is Granularity.CHANNEL or fp8_library.has_blocks(DEVICE)
    assert by_library == (multiplies_fp8(DEVICE) and takes)


@pytest.mark.parametrize("config", KINDS[::2], ids=lambda config: str(config.weights))
@pytest.mark.parametrize(("parts", "channels"), SHAPES)
def test_a_tokens_bits_do_not_depend_on_the_batch(config: Fp8Config, parts: tuple[int, ...], channels: int) -> None:
    layer = layer_of(config, parts, channels)
    layer.batch_invariant = True
    x_TK = torch.randn(max(TOKENS), channels, device=DEVICE, dtype=torch.bfloat16)
    together = layer(x_TK)
    for tokens in TOKENS:
        assert torch.equal(layer(x_TK[:tokens]), together[:tokens]), tokens
        assert torch.equal(layer(x_TK[-tokens:]), together[-tokens:]), tokens


@pytest.mark.parametrize("tokens", [1, 32, 33, 256, 510])
@pytest.mark.parametrize("config", KINDS[::2], ids=lambda config: str(config.weights))
def test_a_captured_layer_replays(config: Fp8Config, tokens: int) -> None:
    layer = layer_of(config, (4096, 1024, 1024), 4096)
    x_TK = torch.randn(tokens, 4096, device=DEVICE, dtype=torch.bfloat16)
    layer(x_TK)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TN = layer(x_TK)
    for _ in range(3):
        x_TK.normal_()
        graph.replay()
        assert torch.equal(out_TN, layer(x_TK))


@pytest.mark.parametrize("tokens", [1, 8, 32])
@pytest.mark.parametrize(
    "make", [partial(layer_of, KINDS[0]), partial(layer_of, KINDS[2]), int8_layer_of], ids=["block", "channel", "int8"]
)
def test_a_captured_chain_of_products_gives_the_bits_of_one_by_one(
    make: Callable[[tuple[int, ...], int], Linear], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each product reads the output of the one before it, while its own weights are being loaded."""
    shapes = [((4096, 1024, 1024), 4096), ((4096,), 6144), ((14336, 14336), 4096), ((4096,), 28672)]
    layers = [make(parts, channels) for parts, channels in shapes]

    def chain(x_TK: Tensor) -> Tensor:
        for _ in range(3):
            for layer in layers:
                x_TK = layer(x_TK)
        return x_TK

    x_TK = torch.randn(tokens, 4096, device=DEVICE, dtype=torch.bfloat16)
    chain(x_TK)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TN = chain(x_TK)
    monkeypatch.setattr(launch, "_can_overlap", lambda device: False)
    for _ in range(20):
        x_TK.normal_()
        expected_TN = chain(x_TK)
        graph.replay()
        assert torch.equal(out_TN, expected_TN)
    assert bool(out_TN.isfinite().all())


@pytest.mark.parametrize("channels", [576, 4096, 7168, 14336])
def test_activations_are_quantized_as_by_the_twin(channels: int) -> None:
    x_TK = torch.randn(300, channels + 64, device=DEVICE, dtype=torch.bfloat16)[:, 64:]
    for kernel, plain in (
        (fp8_quantize.quantize_blocks, fp8.quantize_blocks),
        (partial(fp8_quantize.quantize_blocks, multiple_of=16), partial(fp8.quantize_blocks, multiple_of=16)),
        (fp8_quantize.quantize_tokens, fp8.quantize_tokens),
    ):
        for ours, theirs in zip(kernel(x_TK), plain(x_TK), strict=True):
            assert torch.equal(ours.float(), theirs.float())
            assert ours.stride() == theirs.stride()


def test_activations_are_rounded_where_this_gpu_multiplies_fp8_and_only_there() -> None:
    """Rounding to e4m3 moves a token's results by about 0.026 of their norm, rounding to bfloat16 by 0.003 at most."""
    layer = layer_of(KINDS[2], (4096,), 1024)
    x_TK = torch.randn(16, 1024, device=DEVICE, dtype=torch.bfloat16)
    of_rounded_TN = twin(layer, x_TK)
    of_exact_TN = x_TK.double() @ layer.dequantized(torch.float32).double().T
    rounds = multiplies_fp8(DEVICE)
    expected_TN, other_TN = (of_rounded_TN, of_exact_TN) if rounds else (of_exact_TN, of_rounded_TN)
    out_TN = layer(x_TK).double()
    assert float((out_TN - expected_TN).norm() / expected_TN.norm()) < 0.005
    assert float((out_TN - other_TN).norm() / other_TN.norm()) > 0.01


def test_a_checkpoint_reaches_the_gpu_unchanged(tmp_path: Path) -> None:
    tensors = {f"t{index}": torch.randn(8_000_000 + index).bfloat16() for index in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    targets = {
        name: torch.empty_like(tensor, device=DEVICE, dtype=torch.float32 if name == "t3" else None)
        for name, tensor in tensors.items()
    }
    stored = read_checkpoint(tmp_path)
    for _ in range(2):
        read_into([(stored[name], target) for name, target in targets.items()])
        for name, target in targets.items():
            assert torch.equal(target.cpu(), tensors[name].to(target.dtype)), name
            target.zero_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, fp8.E4M3])
def test_eight_billion_dummy_weights_are_random_and_scaled(dtype: torch.dtype) -> None:
    model = torch.nn.Module()
    for index in range(16):
        weight = torch.empty(2**29, dtype=dtype, device=DEVICE)
        model.register_parameter(f"weight{index}", torch.nn.Parameter(weight, requires_grad=False))
    fill_at_random(model)
    first = next(model.parameters())[: 2**20].float()
    assert float(first.std()) == pytest.approx(0.02 if dtype is torch.bfloat16 else 64, rel=0.02)
