"""The product for few rows: beside torch's in float64, its kernel in the interpreter."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from models.decode_products import use_decode_products
from models.kernels.decode_matmul import (
    MAX_TOKENS,
    DecodeMultiply,
    Tile,
    choose,
    multiply,
    new_counters,
    num_programs,
)
from models.layers import Embedding
from models.linear import Linear
from tests.device import DEVICE

STREAMED = Tile(64, 64, 32, num_warps=4, num_stages=2)
SHAPES = [(1, 128, 64), (3, 200, 136), (16, 330, 256), (17, 64, 512), (33, 170, 264)]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def check(
    x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile, *, num_sms: int, arrived: Tensor | None = None
) -> Tensor:
    arrived = new_counters(weight) if arrived is None else arrived
    out = multiply(x, weight, bias, arrived, tile, num_sms=num_sms)
    expected = linear(x.double(), weight.double(), None if bias is None else bias.double())
    # One rounding of what float32 sums: half of a bf16's last bit.
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-4)
    assert not arrived.any(), "counters are left as they were found"
    return out


@pytest.mark.parametrize("num_sms", [1, 3, 64])
@pytest.mark.parametrize(("num_tokens", "rows", "channels"), SHAPES)
def test_programs_with_equal_shares_multiply(num_tokens: int, rows: int, channels: int, num_sms: int) -> None:
    x, weight = random(num_tokens, channels), random(rows, channels, seed=1)
    check(x, weight, random(rows, seed=2), STREAMED, num_sms=num_sms)


@pytest.mark.parametrize("splits", [1, 3, 100])
@pytest.mark.parametrize(("num_tokens", "rows", "channels"), SHAPES)
def test_programs_that_share_each_tile_multiply(num_tokens: int, rows: int, channels: int, splits: int) -> None:
    x, weight = random(num_tokens, channels), random(rows, channels, seed=1)
    check(x, weight, None, STREAMED._replace(splits=splits), num_sms=1)


@pytest.mark.parametrize(
    "tile", [STREAMED._replace(tokens=16), STREAMED._replace(rows=128), STREAMED._replace(depth=64)]
)
def test_tiles_of_other_sizes_multiply(tile: Tile) -> None:
    check(random(7, 136), random(150, 136, seed=1), None, tile, num_sms=2)


def test_half_precision_and_rows_of_a_wider_matrix() -> None:
    wide = random(5, 96, dtype=torch.float16)
    weight = random(72, 64, dtype=torch.float16, seed=1)
    check(wide[:, 16:80], weight, random(72, dtype=torch.float16, seed=2), STREAMED, num_sms=2)


def test_sums_are_kept_in_float32() -> None:
    # In bf16, 256 and 1 make 256, in each sum and among the partial sums.
    x, weight = torch.ones(1, 1024, device=DEVICE).bfloat16(), torch.ones(64, 1024, device=DEVICE).bfloat16()
    weight[:, -1] = -1020
    for tile in (STREAMED._replace(splits=1), STREAMED._replace(splits=2), STREAMED):
        assert check(x, weight, None, tile, num_sms=3).unique().tolist() == [3.0]


def test_counters_serve_one_launch_after_the_other() -> None:
    x, weight = random(4, 256), random(192, 256, seed=1)
    arrived = new_counters(weight)
    first = check(x, weight, None, STREAMED, num_sms=5, arrived=arrived)
    for tile in (STREAMED._replace(splits=3), STREAMED):
        again = check(x, weight, None, tile, num_sms=5, arrived=arrived)
    assert torch.equal(again, first)


def test_a_tile_holds_all_tokens() -> None:
    for num_tokens in range(1, MAX_TOKENS + 1):
        tile = choose(num_tokens, 4096, 4096)
        assert tile is not None
        assert tile.tokens >= num_tokens


def test_many_tokens_and_small_weights_are_the_librarys() -> None:
    assert choose(MAX_TOKENS + 1, 4096, 4096) is None
    assert choose(1, 64, 256) is None


def test_no_program_gets_too_little() -> None:
    tile = Tile(16, 64, 128, num_warps=4, num_stages=5, per_sm=2)
    assert num_programs(tile, 28672, 4096, 132) == 264
    assert num_programs(tile, 64, 512, 132) == 1
    assert num_programs(tile._replace(splits=3), 128, 256, 132) == 4


def test_as_a_layers_product_it_leaves_to_torch_what_it_cannot_do() -> None:
    x, weight = random(3, 8, dtype=torch.float32), random(5, 8, dtype=torch.float32, seed=1)
    product = DecodeMultiply(new_counters(weight), num_sms=2)
    assert torch.equal(product(x, weight, None), linear(x, weight))
    assert product(x.view(3, 1, 8), weight, None).shape == (3, 1, 5)
    many = random(MAX_TOKENS + 1, 8)
    assert torch.equal(product(many, weight.bfloat16(), None), linear(many, weight.bfloat16()))


def test_as_a_layers_product_it_multiplies_by_the_kernel() -> None:
    x, weight, bias = random(2, 1, 1024), random(1040, 1024, seed=1), random(1040, seed=2)
    arrived = new_counters(weight)
    out = DecodeMultiply(arrived, num_sms=1)(x, weight, bias)
    expected = linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-4)


def test_only_layers_on_a_hopper_gpu_get_it() -> None:
    layers = nn.ModuleList(
        [
            Linear(1024, 1024, dtype=torch.bfloat16),
            Embedding(1024, 1024, dtype=torch.bfloat16),
            Linear(1024, 1024, dtype=torch.float32),
        ]
    ).to(DEVICE)
    use_decode_products(layers)
    hopper = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    given = [isinstance(layer.multiply, DecodeMultiply) for layer in layers]
    assert given == [hopper, hopper, False]
