"""The library computes the fp8 products that it is faster at, and gets scales in the layouts that it reads."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from baton.models.config.quantization.config import Fp8Config, Granularity
from baton.models.formats import fp8
from baton.models.kernels.quantized import fp8_library
from baton.models.kernels.quantized.fp8_gemm import Weight
from baton.models.layers.linear import FusedLinear
from baton.models.quantization import fp8_linear
from baton.models.quantization.fp8_linear import Fp8Linear
from tests.device import DEVICE

BLOCKS = Fp8Config(Granularity.BLOCK, False)
CHANNELS = Fp8Config(Granularity.CHANNEL, False)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def weight_of(rows: int, channels: int, rows_per_scale: int, *, bias: bool = False) -> Weight:
    """A weight that has only shapes. `rows_per_scale` of 1 means one column of scales."""
    with torch.device("meta"):
        columns = 1 if rows_per_scale == 1 else -(-channels // 128)
        scale_RC = torch.empty(-(-rows // rows_per_scale), columns)
        stored_NK = torch.empty(rows, channels, dtype=fp8.E4M3)
        return Weight(stored_NK, scale_RC, rows_per_scale, torch.empty(rows) if bias else None, torch.empty(0))


@pytest.mark.parametrize(
    ("weight", "taken", "by_hopper_alone"),
    [
        (weight_of(6144, 4096, 128), True, True),
        (weight_of(2112, 7168, 128), True, True),  # half a block of rows at the end
        (weight_of(4096, 1792, 128), False, True),  # a column of scales is not a multiple of 16 bytes
        (weight_of(6144, 4096, 64), False, True),
        (weight_of(6144, 4096, 128, bias=True), False, True),
        (weight_of(6144, 4096, 1), True, False),
        (weight_of(6144, 1792, 1, bias=True), True, False),
        (weight_of(6152, 4096, 1), False, False),
    ],
)
def test_the_library_takes_only_layouts_that_it_reads(
    weight: Weight, taken: bool, by_hopper_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fp8_library.takes(weight, torch.bfloat16) == (taken and not by_hopper_alone)
    monkeypatch.setattr(fp8_library, "has_blocks", lambda device: True)
    assert fp8_library.takes(weight, torch.bfloat16) == taken
    assert not fp8_library.takes(weight, torch.float16)


@pytest.mark.parametrize(
    ("weight", "first"),
    [
        (weight_of(28672, 4096, 128), 33),
        (weight_of(7168, 16384, 128), 33),
        (weight_of(4096, 14336, 128), 65),
        (weight_of(28672, 4096, 1), 65),
        (weight_of(4096, 14336, 1), 65),
    ],
)
def test_few_tokens_are_ours(weight: Weight, first: int) -> None:
    by_library = [tokens for tokens in range(0, 300) if fp8_library.is_faster(tokens, weight)]
    assert by_library == list(range(first, 300))


@dataclass
class Library:
    """cuBLAS by its documentation, on a CPU: scales are read from where they must be, whatever their strides say."""

    seen: list[int] = field(default_factory=list)

    def multiply(
        self,
        x_PK: Tensor,
        weight_KN: Tensor,
        *,
        scale_a: Tensor,
        scale_b: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> Tensor:
        assert x_PK.is_contiguous()
        assert weight_KN.T.is_contiguous()
        assert not use_fast_accum
        (tokens, channels), rows = x_PK.shape, weight_KN.shape[1]
        self.seen.append(tokens)
        if scale_a.shape[1] == 1:
            assert (scale_a.shape, scale_b.shape) == ((tokens, 1), (1, rows))
            assert scale_a.is_contiguous()
            assert scale_b.is_contiguous()
            columns_PK, columns_NK = scale_a, scale_b.T
        else:
            columns, blocks = -(-channels // 128), -(-rows // 128)
            assert (scale_a.shape, scale_b.shape) == ((tokens, columns), (columns, blocks))
            assert tokens % 4 == rows % 4 == 0
            scale_PC = scale_a.as_strided((tokens, columns), (1, tokens))
            scale_RC = scale_b.as_strided((blocks, columns), (-(-columns // 4) * 4, 1))
            columns_PK = scale_PC.repeat_interleave(128, dim=1)[:, :channels]
            columns_NK = scale_RC.repeat_interleave(128, dim=0)[:rows].repeat_interleave(128, dim=1)[:, :channels]
        out_PN = (x_PK.float() * columns_PK) @ (weight_KN.T.float() * columns_NK).T
        return (out_PN if bias is None else out_PN + bias.float()).to(out_dtype)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Pretends that this machine has a GPU with the library."""
    library = Library()
    monkeypatch.setattr(torch, "_scaled_mm", library.multiply)
    monkeypatch.setattr(fp8_linear, "multiplies_fp8", lambda device: True)
    monkeypatch.setattr(fp8_library, "has_blocks", lambda device: True)
    return library


def layer_of(config: Fp8Config, *, bias: bool = False) -> Fp8Linear:
    parts = (("gate_proj", 128), ("up_proj", 80))
    replaced = FusedLinear(512, parts, dtype=torch.bfloat16, bias=bias).to(DEVICE)
    layer = Fp8Linear(replaced, "", config, device=DEVICE)
    layer.requires_grad_(requires_grad=False)
    layer.weight.copy_(torch.randn(layer.weight.shape) * 60)
    if layer.bias is not None:
        layer.bias.normal_()
    for index, (_, scale, _) in enumerate(layer.checkpoint_scales()):
        scale.copy_((torch.rand(scale.shape) + index) * 0.01)
    layer.finish()
    return layer


def expected(layer: Fp8Linear, x_TK: Tensor) -> Tensor:
    exact_TN = x_TK.float() @ layer.dequantized(torch.float32).T
    return exact_TN if layer.bias is None else exact_TN + layer.bias.float()


@pytest.mark.parametrize(("tokens", "padded"), [(65, 68), (66, 68), (72, 72)])
@pytest.mark.parametrize("config", [BLOCKS, CHANNELS], ids=lambda config: str(config.weights))
def test_the_library_multiplies_many_tokens(config: Fp8Config, tokens: int, padded: int, library: Library) -> None:
    layer = layer_of(config, bias=config is CHANNELS)
    x_TK = torch.randn(tokens, 512, dtype=torch.bfloat16, device=DEVICE)
    exact_TN = expected(layer, x_TK)
    error_TN = layer(x_TK).float() - exact_TN
    assert library.seen == [padded if config is BLOCKS else tokens]
    # The only error is the rounding of activations; wrong scales would give a far larger one.
    assert float(error_TN.std(dim=1).max()) < 0.05 * float(exact_TN.std())


def test_batch_invariant_products_do_not_use_the_library(library: Library) -> None:
    layer = layer_of(CHANNELS)
    layer.batch_invariant = True
    x_TK = torch.randn(66, 512, dtype=torch.bfloat16, device=DEVICE)
    exact_TN = expected(layer, x_TK)
    error_TN = layer(x_TK).float() - exact_TN
    assert library.seen == []
    assert float(error_TN.std()) < 0.05 * float(exact_TN.std())


def test_padding_is_zeros_and_a_tokens_scales_stay() -> None:
    x_TK = torch.randn(6, 300)
    stored_TK, scale_TC = fp8.quantize_blocks(x_TK)
    stored_PK, scale_PC = fp8.quantize_blocks(x_TK, multiple_of=4)
    assert scale_PC.stride() == (1, 8)
    assert torch.equal(stored_PK[:6].float(), stored_TK.float())
    assert torch.equal(scale_PC[:6], scale_TC)
    assert not stored_PK[6:].float().any()
    assert bool((scale_PC[6:] > 0).all())
