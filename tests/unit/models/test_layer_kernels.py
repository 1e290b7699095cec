"""The kernels of norms, activations and angles equal their twins, number for number where rounding allows it.

Legend: T tokens, D channels, I channels of an MLP.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from baton.models.config.rope import RopeConfig, YarnScaling
from baton.models.families.dense.gemma import GemmaRMSNorm
from baton.models.kernels import activation, norms
from baton.models.kernels.rotary import angles
from baton.models.layers.elementwise import sigmoid
from baton.models.layers.mlp import gelu_tanh_and_multiply, silu_and_multiply
from baton.models.layers.norms import RMSNorm
from baton.models.layers.rotary import Rotary
from tests.device import DEVICE

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_kind = pytest.mark.parametrize("kind", [RMSNorm, GemmaRMSNorm])


def norm_of(kind: type[RMSNorm], size: int, dtype: torch.dtype, seed: int = 0) -> RMSNorm:
    norm = kind(size, eps=1e-5, dtype=dtype).requires_grad_(requires_grad=False)
    nn.init.uniform_(norm.weight, 0.3, 1.5, generator=torch.Generator().manual_seed(seed))
    return norm


def on_device(norm: RMSNorm) -> RMSNorm:
    moved = type(norm)(len(norm.weight), eps=norm.eps, dtype=norm.weight.dtype).requires_grad_(requires_grad=False)
    moved.load_state_dict(norm.state_dict())
    return moved.to(DEVICE)


def rows(num_tokens: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Between columns of NaN, which must not be read."""
    wide = torch.full((num_tokens, size + 5), torch.nan)
    wide[:, 2 : size + 2] = torch.randn(num_tokens, size, generator=torch.Generator().manual_seed(seed)) * 3
    return wide.to(dtype)[:, 2 : size + 2]


def assert_near(ours: Tensor, expected: Tensor) -> None:
    """As near as two orders of summing can be: an ulp where numbers are rounded to 16 bits."""
    assert ours.dtype is expected.dtype
    rtol = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[ours.dtype]
    torch.testing.assert_close(ours.cpu(), expected, rtol=rtol, atol=1e-6)


@by_kind
@by_dtype
@pytest.mark.parametrize("size", [16, 24, 300])
def test_a_norm_equals_its_twin(kind: type[RMSNorm], dtype: torch.dtype, size: int) -> None:
    norm, x_TD = norm_of(kind, size, dtype), rows(3, size, dtype)
    normed_TD = norms.rms_norm(x_TD.to(DEVICE), on_device(norm))
    assert normed_TD.is_contiguous()
    assert_near(normed_TD, norm(x_TD))


@by_kind
@by_dtype
@pytest.mark.parametrize("with_update_norm", [False, True])
def test_an_addition_and_norm_equal_their_twin(kind: type[RMSNorm], dtype: torch.dtype, with_update_norm: bool) -> None:
    norm, update_norm = norm_of(kind, 24, dtype), norm_of(kind, 24, dtype, 1) if with_update_norm else None
    update_TD, stream_TD = rows(5, 24, dtype), rows(5, 24, dtype, 1).contiguous()
    ours_TD = stream_TD.clone().to(DEVICE)
    normed_TD = norms.add_rms_norm(
        ours_TD,
        update_TD.to(DEVICE),
        on_device(norm),
        update_norm=None if update_norm is None else on_device(update_norm),
    )
    expected_TD = norm.add_and_norm(stream_TD, update_TD, update_norm=update_norm)
    assert_near(ours_TD, stream_TD)
    assert_near(normed_TD, expected_TD)


def test_the_sum_is_rounded_as_it_is_stored() -> None:
    norm = norm_of(RMSNorm, 16, torch.bfloat16)
    update_TD, stream_TD = rows(4, 16, torch.bfloat16), rows(4, 16, torch.bfloat16, 1).contiguous()
    ours_TD = stream_TD.clone().to(DEVICE)
    norms.add_rms_norm(ours_TD, update_TD.to(DEVICE), on_device(norm))
    assert torch.equal(ours_TD.cpu(), stream_TD + update_TD)


@by_dtype
def test_a_rows_norm_does_not_depend_on_how_many_rows_there_are(dtype: torch.dtype) -> None:
    norm = on_device(norm_of(RMSNorm, 300, dtype))
    x_TD = rows(9, 300, dtype).to(DEVICE)
    update_TD = rows(9, 300, dtype, 1).to(DEVICE)
    together_TD = norms.add_rms_norm(x_TD.clone(), update_TD, norm)
    for row in (0, 5, 8):
        alone_TD = norms.add_rms_norm(x_TD[row : row + 1].clone(), update_TD[row : row + 1], norm)
        assert torch.equal(alone_TD[0], together_TD[row])


def test_nan_stays_in_its_row() -> None:
    norm, x_TD = on_device(norm_of(RMSNorm, 24, torch.float32)), rows(3, 24, torch.float32)
    x_TD[1, 3] = torch.nan
    normed_TD = norms.add_rms_norm(torch.ones(3, 24, device=DEVICE), x_TD.to(DEVICE), norm)
    assert normed_TD.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("kernel", "twin"),
    [
        (activation.silu_and_multiply, silu_and_multiply),
        (activation.gelu_tanh_and_multiply, gelu_tanh_and_multiply),
    ],
)
@by_dtype
@pytest.mark.parametrize("size", [24, 1100])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's: infinity is what is meant
def test_an_activation_equals_its_twin(
    kernel: Callable[[Tensor], Tensor], twin: Callable[[Tensor], Tensor], dtype: torch.dtype, size: int
) -> None:
    gate_up_TI = rows(3, 2 * size, dtype)
    gate_up_TI[0, :6] = torch.tensor([0.0, -0.0, 60.0, -60.0, 1e-4, -11.0])
    ours_TI, expected_TI = kernel(gate_up_TI.to(DEVICE)), twin(gate_up_TI.cpu())
    assert ours_TI.shape == (3, size)
    # The gate's rounding may fall to either side, and is multiplied.
    rtol = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(ours_TI.cpu(), expected_TI, rtol=rtol, atol=1e-5)


@by_dtype
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_a_clamped_activation_equals_its_twin(dtype: torch.dtype) -> None:
    gate_up_TI = (torch.randn(3, 2200, generator=torch.Generator().manual_seed(0)) * 6).to(dtype)
    gate_TI, up_TI = gate_up_TI[:, ::2].float().clamp(max=7.0), gate_up_TI[:, 1::2].float().clamp(-7.0, 7.0)
    expected_TI = (gate_TI * torch.sigmoid(1.7 * gate_TI) * (up_TI + 1)).to(dtype)
    ours_TI = activation.clamp_and_gate(gate_up_TI.to(DEVICE), limit=7.0, alpha=1.7)
    # The one rounding may fall to either side.
    rtol = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(ours_TI.cpu(), expected_TI, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("dim", [12, 64])
def test_angles_equal_their_twin(dim: int) -> None:
    scaling = YarnScaling(8.0, 64, 32.0, 1.0, truncate=True, attention_factor=1.25, mscale=0.0, mscale_all_dim=0.0)
    rotary = Rotary(RopeConfig(dim, 10_000.0, interleaved=False, scaling=scaling))
    positions_T = torch.tensor([0, 1, 7, 8191, 131_071, 1_048_575, 10_485_759, 3, 4])
    expected = rotary(positions_T)
    cos_TP, sin_TP = angles(positions_T.to(DEVICE), rotary.frequencies.to(DEVICE), rotary.scale)
    torch.testing.assert_close(cos_TP.cpu(), expected.cos_TP, rtol=0, atol=1e-6)
    torch.testing.assert_close(sin_TP.cpu(), expected.sin_TP, rtol=0, atol=1e-6)


@by_dtype
def test_a_gate_of_each_head_equals_two_calls(dtype: torch.dtype) -> None:
    """Heads of gates lie between those of queries."""
    x_THC, wide_TH2C = torch.randn(3, 5, 12).to(dtype), (torch.randn(3, 5, 2, 12) * 4).to(dtype)
    gated_THC = activation.multiply_by_sigmoid(x_THC.to(DEVICE), wide_TH2C.to(DEVICE)[:, :, 1])
    assert gated_THC.is_contiguous()
    assert_near(gated_THC, x_THC * sigmoid(wide_TH2C[:, :, 1]))


def test_one_gate_of_a_whole_row_equals_two_calls() -> None:
    x_TD, gate_T1 = torch.randn(3, 40).bfloat16(), torch.randn(3, 1).bfloat16()
    gate_TD1 = gate_T1.to(DEVICE).unsqueeze(-1).expand(3, 40, 1)
    gated_TD1 = activation.multiply_by_sigmoid(x_TD.to(DEVICE).unsqueeze(-1), gate_TD1)
    assert_near(gated_TD1.squeeze(-1), x_TD * sigmoid(gate_T1))
