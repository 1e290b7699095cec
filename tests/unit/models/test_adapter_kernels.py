"""The kernels of adapters' products equal their twin, leave tokens without an adapter alone, and may be captured."""

import pytest
import torch
from torch import Tensor

from models.adapters.bank import add_in_torch
from models.kernels import adapter_products
from models.kernels.adapter_products import SlotWeights, add_products, output_tiles
from tests.device import DEVICE


def random_weights(sizes: list[int], inputs: int, rank: int, dtype: torch.dtype, *, slots: int = 3) -> SlotWeights:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return SlotWeights(
        draw(slots, len(sizes) * rank, inputs),
        draw(slots, sum(sizes), rank),
        torch.rand(slots, len(sizes), generator=generator),
        output_tiles(sizes),
    )


def slots_of(num_tokens: int) -> Tensor:
    return torch.tensor([(-1, 0, 2, 2, -7)[token % 5] for token in range(num_tokens)], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["by token", "by tile"])
@pytest.mark.parametrize(
    ("num_tokens", "sizes", "inputs", "rank"), [(3, [24], 40, 16), (7, [136, 8], 80, 48), (18, [16, 16], 16, 16)]
)
def test_products(
    num_tokens: int, sizes: list[int], inputs: int, rank: int, batch_invariant: bool, dtype: torch.dtype
) -> None:
    weights, slots_T = random_weights(sizes, inputs, rank, dtype), slots_of(num_tokens)
    generator = torch.Generator().manual_seed(1)
    x_TK = torch.randn(num_tokens, inputs + 3, generator=generator).to(dtype)[:, 1 : inputs + 1]
    out_TN = torch.randn(num_tokens, sum(sizes), generator=generator).to(dtype)
    out_TN[slots_T < 0] = torch.nan  # neither read nor written
    expected_TN, ours_TN = out_TN.clone(), out_TN.to(DEVICE)
    add_in_torch(x_TK, expected_TN, slots_T, weights, sizes)
    on_device = SlotWeights(*(each.to(DEVICE) for each in weights))
    add_products(x_TK.to(DEVICE), ours_TN, slots_T.to(DEVICE), on_device, batch_invariant=batch_invariant)
    rtol, atol = (1e-5, 1e-4) if dtype is torch.float32 else (2**-6, 0.5)
    torch.testing.assert_close(ours_TN.cpu(), expected_TN, rtol=rtol, atol=atol, equal_nan=True)


def test_many_tokens_go_by_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_products, "_MOST_SINGLE_TOKENS", 8)
    test_products(9, [24], 40, 16, False, torch.float32)
