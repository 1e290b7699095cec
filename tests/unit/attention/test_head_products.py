"""Each head's product of few rows: compared with torch's in float64, as latent attention calls it, its kernel in the
interpreter."""

import pytest
import torch
from torch import Tensor

from attention.kernels.mla import head_products
from attention.kernels.mla.head_products import MAX_TOKENS, HeadProducts, HeadTile, choose, multiply_heads
from tests.device import DEVICE

HEADS, SMS = 3, 132
# Channels of a query, a value and a latent; powers of two, or none.
SIZES = [(16, 32, 64), (24, 40, 48)]
# Heads, inputs and outputs of both products of DeepSeek-V2-Lite, and of V3.
V2_LITE = ((16, 128, 512), (16, 512, 128))
V3 = ((128, 128, 512), (128, 512, 128))


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def check(x_HTI: Tensor, weight_HIO: Tensor, out_HTO: Tensor) -> None:
    expected_HTO = x_HTI.double() @ weight_HIO.double()
    # One rounding of a float32 sum: half of the dtype's last bit.
    rounding = 2**-8 if out_HTO.dtype is torch.bfloat16 else 2**-11
    torch.testing.assert_close(out_HTO.double(), expected_HTO, rtol=rounding, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 9, 17, 32])
def test_queries_go_to_the_latent_space(num_tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    query, value, latent = sizes
    q_THD = random(num_tokens, HEADS, query + 8, dtype=dtype)
    q_THD[..., query:] = torch.nan  # rotary channels
    weight_HXL = random(HEADS, query + value, latent, dtype=dtype, seed=1)
    weight_HXL[:, query:] = torch.nan  # of values
    out_THC = poisoned(num_tokens, HEADS, latent + 8, dtype=dtype)
    out_HTL = out_THC[..., :latent].transpose(0, 1)
    multiply_heads(q_THD[..., :query].transpose(0, 1), weight_HXL[:, :query], out_HTL, HeadTile(32, num_warps=4))
    check(q_THD[..., :query].transpose(0, 1), weight_HXL[:, :query], out_HTL)
    assert out_THC[..., latent:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 9, 17, 32])
def test_attended_latents_become_values(num_tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    query, value, latent = sizes
    attended_THL = random(num_tokens, HEADS, latent, dtype=dtype)
    weight_HXL = random(HEADS, query + value, latent, dtype=dtype, seed=1)
    weight_HXL[:, :query] = torch.nan
    weight_HLV = weight_HXL[:, query:].transpose(1, 2)
    out_THV = poisoned(num_tokens + 1, HEADS, value, dtype=dtype)
    out_HTV = out_THV[:num_tokens].transpose(0, 1)
    multiply_heads(attended_THL.transpose(0, 1), weight_HLV, out_HTV, HeadTile(16, num_warps=4))
    check(attended_THL.transpose(0, 1), weight_HLV, out_HTV)
    assert out_THV[num_tokens:].isnan().all()


@pytest.mark.parametrize("outputs", [16, 64, 128])
def test_tiles_of_other_widths_multiply(outputs: int) -> None:
    x_HTI, weight_HIO, out_HTO = random(2, 5, 32), random(2, 32, 104, seed=1), poisoned(2, 5, 104)
    multiply_heads(x_HTI, weight_HIO, out_HTO, HeadTile(outputs, num_warps=4))
    check(x_HTI, weight_HIO, out_HTO)


def test_channels_of_any_stride_are_read() -> None:
    x_HTI = random(32, 2, 5).permute(1, 2, 0)
    weight_HIO = random(2, 32, 16, seed=1)
    out_HTO = poisoned(2, 16, 5).transpose(1, 2)
    multiply_heads(x_HTI, weight_HIO, out_HTO, HeadTile(16, num_warps=4))
    check(x_HTI, weight_HIO, out_HTO)


def test_sums_are_kept_in_float32() -> None:
    # In bf16, 256 and 1 make 256.
    x_HTI, weight_HIO, out_HTO = torch.ones(1, 1, 512), torch.ones(1, 512, 16), poisoned(1, 1, 16)
    weight_HIO[:, -1] = -508
    multiply_heads(x_HTI.to(out_HTO), weight_HIO.to(out_HTO), out_HTO, HeadTile(16, num_warps=4))
    assert out_HTO.unique().tolist() == [3.0]


def test_few_heads_keep_multiprocessors_busy_and_many_get_tiles_that_fit() -> None:
    programs = [
        num_heads * -(-outputs // choose(num_heads, inputs, outputs, SMS).outputs)
        for num_heads, inputs, outputs in V2_LITE
    ]
    assert programs == [128, 64]
    for num_heads, inputs, outputs in (*V2_LITE, *V3, (8, 128, 512), (1, 512, 128)):
        tile = choose(num_heads, inputs, outputs, SMS)
        assert 32 <= tile.outputs <= outputs
        assert 2 * inputs * tile.outputs <= 64 << 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_as_a_layers_product_it_leaves_unsupported_products_to_torch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("not torch's")

    monkeypatch.setattr(head_products, "multiply_heads", refuse)
    num_tokens, inputs = (MAX_TOKENS + 1, 16) if dtype is torch.bfloat16 else (2, 16)
    cases = [(random(2, num_tokens, inputs, dtype=dtype), random(2, inputs, 16, dtype=dtype, seed=1))]
    if dtype is torch.bfloat16:
        cases.append((random(2, 2, 12), random(2, 12, 12, seed=1)))  # rows that the copy engine cannot read
        cases.append((random(2, 2, 16), random(2, 16, 32, seed=1)[:, :, ::2]))
        cases.append((random(2, 2, 520), random(2, 520, 16, seed=1)))
    for x_HTI, weight_HIO in cases:
        out_HTO = poisoned(2, x_HTI.shape[1], weight_HIO.shape[2], dtype=dtype)
        HeadProducts(SMS)(x_HTI, weight_HIO, out_HTO)
        assert torch.equal(out_HTO, torch.bmm(x_HTI, weight_HIO))


def test_as_a_layers_product_it_multiplies_few_rows_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "bmm")
    x_HTI, weight_HIO, out_HTO = random(2, 3, 32), random(2, 32, 48, seed=1), poisoned(2, 3, 48)
    HeadProducts(SMS)(x_HTI, weight_HIO, out_HTO)
    check(x_HTI, weight_HIO, out_HTO)
    HeadProducts(SMS)(x_HTI[:, :0], weight_HIO, out_HTO[:, :0])


def test_only_weights_on_a_hopper_gpu_are_for_it() -> None:
    hopper = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    assert (HeadProducts.for_weight(random(16, 16)) is not None) is hopper
    assert HeadProducts.for_weight(random(16, 16, dtype=torch.float32)) is None
