"""The product for few rows equals torch's in float64; its kernel runs in the interpreter."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from attention.backend import AttentionNeeds, MLADims
from attention.backends.torch_mla import TorchMLA
from attention.backends.triton_mla import TritonMLA
from attention.kernels.mla.head_products import HeadProducts
from attention.mla import MLAAttention, library_heads_product
from attention.platform import probe_platform
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVKind
from baton.models.kernels.matmul.decode_matmul import (
    MAX_TOKENS,
    DecodeMultiply,
    DecodeTile,
    choose,
    multiply,
    new_counters,
)
from baton.models.kernels.matmul.matmul import multiply_heads_invariant
from baton.models.layers.embedding import Embedding
from baton.models.layers.linear import Linear
from baton.models.layers.products import use_decode_products, use_library_products
from tests.device import DEVICE

SMALL = DecodeTile(64, 64, 32, num_warps=4, num_stages=2)
SHAPES = [(1, 128, 64), (3, 200, 136), (16, 330, 256), (17, 64, 512), (33, 170, 264)]
SMS = 132
# (rows, channels) of a layer's weights, and the head's
LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
LLAMA_8B_HEAD = (128256, 4096)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def check(x: Tensor, weight: Tensor, bias: Tensor | None, tile: DecodeTile, *, arrived: Tensor | None = None) -> Tensor:
    arrived = new_counters(weight) if arrived is None else arrived
    out = multiply(x, weight, bias, arrived, tile)
    expected = linear(x.double(), weight.double(), None if bias is None else bias.double())
    # One rounding of a float32 sum: half of a bf16's last bit.
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-4)
    assert not arrived.any(), "counters are left as they were found"
    return out


@pytest.mark.parametrize("splits", [1, 3, 100])
@pytest.mark.parametrize(("num_tokens", "rows", "channels"), SHAPES)
def test_programs_that_share_tiles_multiply(num_tokens: int, rows: int, channels: int, splits: int) -> None:
    x, weight = random(num_tokens, channels), random(rows, channels, seed=1)
    check(x, weight, random(rows, seed=2), SMALL._replace(splits=splits))


@pytest.mark.parametrize("tile", [SMALL._replace(tokens=16), SMALL._replace(rows=128), SMALL._replace(depth=64)])
def test_tiles_of_other_sizes_multiply(tile: DecodeTile) -> None:
    check(random(7, 136), random(150, 136, seed=1), None, tile._replace(splits=2))


def test_half_precision_and_rows_of_a_wider_matrix() -> None:
    wide = random(5, 96, dtype=torch.float16)
    weight = random(72, 64, dtype=torch.float16, seed=1)
    check(wide[:, 16:80], weight, random(72, dtype=torch.float16, seed=2), SMALL)


def test_sums_are_kept_in_float32() -> None:
    # In bf16, 256 and 1 make 256, in each sum and among the partial sums.
    x, weight = torch.ones(1, 1024, device=DEVICE).bfloat16(), torch.ones(64, 1024, device=DEVICE).bfloat16()
    weight[:, -1] = -1020
    for splits in (1, 2, 7):
        assert check(x, weight, None, SMALL._replace(splits=splits)).unique().tolist() == [3.0]


def test_counters_serve_one_launch_after_the_other() -> None:
    x, weight = random(4, 256), random(192, 256, seed=1)
    arrived = new_counters(weight)
    first = check(x, weight, None, SMALL._replace(splits=5), arrived=arrived)
    for splits in (3, 5):
        again = check(x, weight, None, SMALL._replace(splits=splits), arrived=arrived)
    assert torch.equal(again, first)


def test_a_tile_holds_all_tokens_and_is_cut_into_no_more_parts_than_it_has_steps() -> None:
    for num_tokens in range(1, 33):
        for rows, channels in (*LLAMA_8B, LLAMA_8B_HEAD):
            tile = choose(num_tokens, rows, channels, SMS)
            assert tile is not None
            assert tile.tokens >= num_tokens
            assert 1 <= tile.splits <= channels // tile.depth


def test_many_tokens_are_the_librarys_but_for_large_weights() -> None:
    for rows, channels in LLAMA_8B:
        assert choose(33, rows, channels, SMS) is None
    assert choose(MAX_TOKENS, *LLAMA_8B_HEAD, SMS) is not None
    assert choose(MAX_TOKENS + 1, *LLAMA_8B_HEAD, SMS) is None


def test_short_products_are_ours_only_in_several_parts() -> None:
    assert choose(1, 5632, 2048, SMS) is None  # 88 tiles for 132 multiprocessors
    assert choose(17, 3648, 2048, SMS) is None
    for rows in (576, 3648):
        few = choose(1, rows, 2048, SMS)
        assert few is not None
        assert few.splits > 1


def test_a_long_product_leaves_no_multiprocessor_idle() -> None:
    assert choose(1, 7168, 16384, SMS) is None  # 112 tiles
    assert choose(1, 8192, 8192, SMS) is not None  # 128


def test_a_model_needs_few_kernels() -> None:
    shapes = (*LLAMA_8B, LLAMA_8B_HEAD)
    tiles = {choose(num_tokens, *shape, SMS) for num_tokens in range(1, MAX_TOKENS + 1) for shape in shapes}
    assert len(tiles - {None}) <= 8


def test_as_a_layers_product_it_leaves_unsupported_products_to_torch() -> None:
    x, weight = random(3, 8, dtype=torch.float32), random(5, 8, dtype=torch.float32, seed=1)
    product = DecodeMultiply(new_counters(weight), num_sms=2)
    assert torch.equal(product(x, weight, None), linear(x, weight))
    assert product(x.view(3, 1, 8), weight, None).shape == (3, 1, 5)
    many = random(MAX_TOKENS + 1, 8)
    assert torch.equal(product(many, weight.bfloat16(), None), linear(many, weight.bfloat16()))


def test_as_a_layers_product_it_multiplies_by_the_kernel() -> None:
    x, weight, bias = random(2, 1, 1024), random(1040, 1024, seed=1), random(1040, seed=2)
    arrived = new_counters(weight)
    out = DecodeMultiply(arrived, num_sms=8)(x, weight, bias)
    expected = linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-4)


def test_only_layers_on_a_hopper_gpu_get_it() -> None:
    layers = nn.ModuleList(
        [
            Linear(1024, 1024, dtype=torch.bfloat16),
            Embedding(1024, 1024, dtype=torch.bfloat16),
            Linear(1024, 1024, dtype=torch.float32),
            Linear(64, 64, dtype=torch.bfloat16),
        ]
    ).to(DEVICE)
    use_decode_products(layers)
    hopper = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    given = [isinstance(layer.multiply, DecodeMultiply) for layer in layers]
    assert given == [hopper, hopper, False, False]
    assert len(use_library_products(layers)) == sum(given)
    assert all(layer.multiply is linear for layer in layers)


def latent_attention(dtype: torch.dtype) -> MLAAttention:
    dims = MLADims(qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, kv_lora_rank=32)
    name = str(dtype).removeprefix("torch.")
    needs = AttentionNeeds(
        KVKind.MLA, DEVICE, name, 40, 16, KVCacheLayout.LBNC, num_heads=2, mla=dims, max_num_reqs=2, max_model_len=16
    )
    backend = (TritonMLA if DEVICE == "cuda" else TorchMLA)(needs, probe_platform(DEVICE), context_workspace_tokens=8)
    return MLAAttention(
        num_heads=2,
        qk_nope_head_dim=dims.qk_nope_head_dim,
        qk_rope_head_dim=dims.qk_rope_head_dim,
        v_head_dim=dims.v_head_dim,
        kv_lora_rank=dims.kv_lora_rank,
        scale=1.0,
        layer_index=0,
        kv_b_proj=Linear(32, 64, dtype=dtype).to(DEVICE),
        backend=backend,
    )


def test_heads_of_latent_attention_get_theirs_on_a_hopper_gpu_and_give_it_back() -> None:
    layers = [latent_attention(torch.bfloat16), latent_attention(torch.float32)]
    model = nn.ModuleList(layers)
    assert all(layer.multiply_heads is library_heads_product for layer in layers)
    use_decode_products(model)
    hopper = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    assert [isinstance(layer.multiply_heads, HeadProducts) for layer in layers] == [hopper, False]
    layers[0].multiply_heads = HeadProducts(SMS)
    assert use_library_products(model) == []
    assert all(layer.multiply_heads is library_heads_product for layer in layers)


def test_heads_whose_product_does_not_depend_on_the_batch_keep_it() -> None:
    layer = latent_attention(torch.bfloat16)
    layer.multiply_heads = multiply_heads_invariant
    use_decode_products(layer)
    use_library_products(layer)
    assert layer.multiply_heads is multiply_heads_invariant
