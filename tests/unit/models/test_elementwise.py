"""Functions of single numbers: torch's values, with the same bits wherever a number is."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from baton.models.layers.elementwise import gelu, sigmoid, silu, softplus

Function = Callable[[Tensor], Tensor]
PAIRS: list[tuple[Function, Function]] = [
    (sigmoid, torch.sigmoid),
    (silu, functional.silu),
    (softplus, functional.softplus),
]
GELUS = [gelu, partial(gelu, approximate="tanh")]
ALL = [*(ours for ours, _ in PAIRS), *GELUS]


def numbers() -> Tensor:
    drawn: Tensor = torch.randn(1003, generator=torch.Generator().manual_seed(0)) * 8
    return torch.cat((drawn, torch.tensor([0.0, 100.0, -100.0, 1e-30])))


@pytest.mark.parametrize(("ours", "torchs"), PAIRS)
def test_values_are_torch_s(ours: Function, torchs: Function) -> None:
    torch.testing.assert_close(ours(numbers()), torchs(numbers().double()).float(), rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_torch_s(approximate: str) -> None:
    torch.testing.assert_close(
        gelu(numbers(), approximate=approximate), functional.gelu(numbers(), approximate=approximate)
    )


@pytest.mark.parametrize("ours", ALL)
def test_a_number_has_the_same_bits_alone_and_in_any_tensor(ours: Function) -> None:
    x = numbers()
    whole = ours(x)
    assert torch.equal(torch.cat([ours(number) for number in x.split(1)]), whole)
    assert torch.equal(ours(torch.stack((x, x), 1)[:, 0]), whole)


@pytest.mark.parametrize("ours", [ours for ours in ALL if ours is not softplus])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(ours: Function, dtype: torch.dtype) -> None:
    x = numbers().to(dtype)
    assert torch.equal(ours(x), ours(x.float()).to(dtype))
