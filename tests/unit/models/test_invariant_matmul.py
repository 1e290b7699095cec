"""Products that do not depend on the other rows: to the last bit on a CPU; the kernels multiply in the interpreter."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from baton.core.setting_names import SOURCE_ROOT
from baton.models.kernels.matmul.matmul import (
    TILES,
    MatmulTile,
    choose_tile,
    multiply_heads_invariant,
    multiply_in_tiles,
    multiply_invariant,
    multiply_strided,
)
from baton.models.layers.moe.experts import weighted_sum
from baton.settings.environment import child_environment
from tests.device import DEVICE

SHAPES = [(96, 32), (61, 32), (32, 48), (1, 7), (33, 129), (4096, 64), (100, 12), (64, 1024)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_columns", "depth"), SHAPES)
def test_on_a_cpu_a_row_has_the_same_bits_among_any_other_rows(
    num_columns: int, depth: int, dtype: torch.dtype
) -> None:
    x, weight = random(300, depth, dtype=dtype), random(num_columns, depth, dtype=dtype, seed=1)
    bias = random(num_columns, dtype=dtype, seed=2)
    together = multiply_invariant(x, weight, bias)
    for num_rows in (*range(1, 36), 64, 100, 255, 300):
        start = num_rows * 7 % (301 - num_rows)
        some = multiply_invariant(x[start : start + num_rows], weight, bias)
        assert torch.equal(some, together[start : start + num_rows]), num_rows
    torch.testing.assert_close(
        together,
        linear(x, weight, bias),
        rtol=2e-2 if dtype is torch.bfloat16 else 1e-5,
        atol=1e-1 if dtype is torch.bfloat16 else 1e-4,
    )


def test_on_a_cpu_so_it_has_at_every_depth() -> None:
    for depth in range(1, 131):
        for num_columns in (1, 2, 3, 9, 16, 31):
            x, weight = random(35, depth, seed=depth), random(num_columns, depth, seed=num_columns)
            together = multiply_invariant(x, weight)
            for start, num_rows in ((0, 1), (1, 1), (15, 2), (33, 1), (17, 18)):
                some = multiply_invariant(x[start : start + num_rows], weight)
                assert torch.equal(some, together[start : start + num_rows]), (depth, num_columns, start)


@pytest.mark.slow
def test_on_a_cpu_so_it_has_where_the_library_computes_rows_of_a_block_in_different_ways() -> None:
    """In a process of its own: MKL reads which instructions it may use when it is loaded. With those of old CPUs it
    computes some rows of a block otherwise, as on other CPUs with other sizes."""
    environment = child_environment(MKL_ENABLE_INSTRUCTIONS="SSE4_2", OMP_NUM_THREADS="1")
    script = (
        "from tests.unit.models import test_invariant_matmul as tests\ntests.test_on_a_cpu_so_it_has_at_every_depth()\n"
    )
    subprocess.run([sys.executable, "-c", script], env=environment, cwd=SOURCE_ROOT, check=True, timeout=300)


def test_a_token_s_experts_add_up_to_the_same_bits_among_any_other_tokens() -> None:
    for size in (*range(1, 131, 3), 54):
        for num_choices in (1, 2, 8, 9):
            out, weights = random(23, num_choices, size), random(23, num_choices, seed=1)
            together = weighted_sum(out, weights)
            for token in (0, 1, 2, 22):
                alone = weighted_sum(out[token : token + 1].clone(), weights[token : token + 1].clone())
                assert torch.equal(alone[0], together[token]), (size, num_choices)


def test_on_a_cpu_a_row_of_a_head_has_the_same_bits_among_any_other_rows() -> None:
    x_MHK, weight_HNK = random(40, 3, 12), random(3, 24, 12, seed=1)
    together = torch.empty(40, 3, 24)
    multiply_heads_invariant(x_MHK.transpose(0, 1), weight_HNK.transpose(1, 2), together.transpose(0, 1))
    for num_rows in range(1, 40):
        some = torch.full((num_rows, 3, 24), torch.nan)
        rows_HMK = x_MHK[40 - num_rows :].transpose(0, 1)
        multiply_heads_invariant(rows_HMK, weight_HNK.transpose(1, 2), some.transpose(0, 1))
        assert torch.equal(some, together[40 - num_rows :]), num_rows
    torch.testing.assert_close(together, torch.einsum("mhk,hnk->mhn", x_MHK, weight_HNK), rtol=1e-5, atol=1e-5)


def test_no_rows_give_no_rows_and_leading_axes_stay() -> None:
    assert multiply_invariant(random(0, 8), random(5, 8)).shape == (0, 5)
    x, weight = random(2, 3, 8), random(5, 8, seed=1)
    torch.testing.assert_close(multiply_invariant(x, weight), linear(x, weight))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tile", [*TILES[:2], MatmulTile(64, 32, 64, num_warps=4, num_stages=2)], ids=str)
def test_the_kernel_of_whole_tiles_multiplies(tile: MatmulTile, with_bias: bool) -> None:
    x = random(70, 168, dtype=torch.bfloat16).to(DEVICE)
    weight = random(50, 168, dtype=torch.bfloat16, seed=1).to(DEVICE)
    bias = random(50, dtype=torch.bfloat16, seed=2).to(DEVICE) if with_bias else None
    out = torch.full((70, 50), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    multiply_in_tiles(x, weight, bias, out, tile)
    expected = linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(out.float(), expected, rtol=1.6e-2, atol=1e-2)


def test_the_order_of_the_tiles_leaves_none_out() -> None:
    x, weight = random(1300, 8).half().to(DEVICE), random(40, 8, seed=1).half().to(DEVICE)
    out = torch.full((1300, 40), torch.nan, dtype=torch.float16, device=DEVICE)
    multiply_in_tiles(x, weight, None, out, TILES[1])
    torch.testing.assert_close(out.float(), x.float() @ weight.float().t(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_for_any_strides_multiplies_heads(dtype: torch.dtype) -> None:
    x_MHK, weight_HNK = random(35, 2, 40, dtype=dtype).to(DEVICE), random(2, 50, 40, dtype=dtype, seed=1).to(DEVICE)
    wide = torch.full((35, 2, 60), torch.nan, dtype=dtype, device=DEVICE)
    multiply_strided(x_MHK.transpose(0, 1), weight_HNK.transpose(1, 2), None, wide[..., :50].transpose(0, 1))
    expected = torch.einsum("mhk,hnk->mhn", x_MHK.float(), weight_HNK.float())
    tolerance = 1e-5 if dtype is torch.float32 else 1.6e-2
    torch.testing.assert_close(wide[..., :50].float(), expected, rtol=tolerance, atol=tolerance)
    assert wide[..., 50:].isnan().all()


def test_tensors_that_the_copy_engine_cannot_read_are_read_by_strides() -> None:
    x, weight, bias = (
        random(5, 12).half().to(DEVICE),
        random(7, 12, seed=1).half().to(DEVICE),
        random(7).half().to(DEVICE),
    )
    out = torch.empty(5, 7, dtype=torch.float16, device=DEVICE)
    multiply_in_tiles(x, weight, bias, out)
    torch.testing.assert_close(out, linear(x, weight, bias), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("num_rows", "rows"), [(1, 64), (64, 64), (8192, 128)])
def test_few_rows_take_small_tiles_and_many_rows_large_ones(num_rows: int, rows: int) -> None:
    assert choose_tile(num_rows, 4096, num_sms=132).rows == rows


def test_every_tile_is_whole_instructions_of_64_rows() -> None:
    for tile in TILES:
        assert tile.rows % 64 == 0
        assert tile.num_warps * 16 == tile.rows
