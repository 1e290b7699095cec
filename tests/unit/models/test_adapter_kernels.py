"""The kernels of adapters' products equal their twin, leave tokens without an adapter alone, and may be captured."""

import pytest
import torch
from torch import Tensor

from baton.models.adapters.layer import add_in_torch
from baton.models.kernels import adapter_rows
from baton.models.kernels.adapter_products import SlotWeights, add_products, add_rows, expand, new_sums, shrink
from baton.models.kernels.adapter_rows import FEW_TOKENS, MANY_TOKENS, group_by_adapter
from tests.device import DEVICE

SLOTS = 3
# Outputs of the parts, inputs, rank.
SHAPES = [((24,), 40, 16), ((136, 8), 80, 48), ((16, 32), 1100, 16), ((640, 16), 64, 64)]


def random_weights(sizes: tuple[int, ...], inputs: int, rank: int, dtype: torch.dtype) -> SlotWeights:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    a_SQK, b_SNR = draw(SLOTS, len(sizes) * rank, inputs), draw(SLOTS, sum(sizes), rank)
    return SlotWeights(a_SQK, b_SNR, torch.rand(SLOTS, len(sizes), generator=generator), sizes)


def random_inputs(num_tokens: int, inputs: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_tokens, inputs + 3, generator=generator).to(dtype)[:, 1 : inputs + 1]


def slots_of(num_tokens: int) -> Tensor:
    return torch.tensor([(-1, 0, 2, 2, -7)[token % 5] for token in range(num_tokens)], dtype=torch.int32)


def products(
    x_TK: Tensor, out_TN: Tensor, slots_T: Tensor, weights: SlotWeights, *, batch_invariant: bool = False
) -> Tensor:
    """The kernels' result."""
    ours_TN = out_TN.to(DEVICE, copy=True)
    a_SQK, b_SNR, scale_SP = (each.to(DEVICE) for each in (weights.a_SQK, weights.b_SNR, weights.scale_SP))
    rows = group_by_adapter(slots_T.to(DEVICE), num_slots=SLOTS, batch_invariant=batch_invariant)
    add_products(x_TK.to(DEVICE), ours_TN, rows, SlotWeights(a_SQK, b_SNR, scale_SP, weights.sizes))
    return ours_TN.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("num_tokens", [3, 18])
@pytest.mark.parametrize(("sizes", "inputs", "rank"), SHAPES)
def test_products_equal_their_twin(
    num_tokens: int, sizes: tuple[int, ...], inputs: int, rank: int, batch_invariant: bool, dtype: torch.dtype
) -> None:
    weights, slots_T = random_weights(sizes, inputs, rank, dtype), slots_of(num_tokens)
    x_TK = random_inputs(num_tokens, inputs, dtype)
    out_TN = torch.randn(num_tokens, sum(sizes), generator=torch.Generator().manual_seed(2)).to(dtype)
    out_TN[slots_T < 0] = torch.nan  # neither read nor written
    expected_TN = out_TN.clone()
    add_in_torch(x_TK, expected_TN, slots_T, weights)
    ours_TN = products(x_TK, out_TN, slots_T, weights, batch_invariant=batch_invariant)
    rtol, atol = (1e-5, 2e-3) if dtype is torch.float32 else (2**-6, 2.0)
    torch.testing.assert_close(ours_TN, expected_TN, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["few tokens", "many tokens"])
def test_a_token_has_the_same_bits_alone_and_next_to_others(batch_invariant: bool) -> None:
    weights = random_weights((40, 24), 1100, 16, torch.bfloat16)
    x_TK, slots_T = random_inputs(21, 1100, torch.bfloat16), slots_of(21)
    out_TN = torch.zeros(21, 64, dtype=torch.bfloat16)
    together_TN = products(x_TK, out_TN, slots_T, weights, batch_invariant=batch_invariant)
    for token in (1, 2, 13):
        one = slice(token, token + 1)
        alone_TN = products(x_TK[one], out_TN[one], slots_T[one], weights, batch_invariant=batch_invariant)
        assert alone_TN.equal(together_TN[one])


def test_steps_of_many_tokens_have_larger_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_rows, "MOST_SHARED_TOKENS", 8)
    for num_tokens, expected in ((8, FEW_TOKENS), (9, MANY_TOKENS)):
        assert group_by_adapter(slots_of(num_tokens).to(DEVICE), num_slots=SLOTS).group_tokens == expected


@pytest.mark.parametrize(("sizes", "inputs", "rank"), SHAPES)
def test_products_that_are_added_later_equal_products_that_are_added_at_once(
    sizes: tuple[int, ...], inputs: int, rank: int
) -> None:
    cpu, slots_T = random_weights(sizes, inputs, rank, torch.float32), slots_of(18)
    weights = SlotWeights(cpu.a_SQK.to(DEVICE), cpu.b_SNR.to(DEVICE), cpu.scale_SP.to(DEVICE), sizes)
    x_TK = random_inputs(18, inputs, torch.float32).to(DEVICE)
    at_once_TN = torch.randn(18, sum(sizes), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    later_TN, products_TN = at_once_TN.clone(), torch.full_like(at_once_TN, torch.nan)
    rows = group_by_adapter(slots_T.to(DEVICE), num_slots=SLOTS)
    sums_TQC = new_sums(x_TK, rows, weights)
    shrink(x_TK, rows, weights, sums_TQC)
    expand(sums_TQC, at_once_TN, rows, weights)
    expand(sums_TQC, products_TN, rows, weights, adds=False)
    add_rows(products_TN, later_TN, rows)
    torch.testing.assert_close(later_TN, at_once_TN, rtol=1e-6, atol=1e-5)
    assert products_TN[slots_T < 0].isnan().all()  # not written
