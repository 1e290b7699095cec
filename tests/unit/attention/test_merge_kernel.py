"""The merging kernel reads and writes any float types and strides, and only the rows of the batch."""

import pytest
import torch
from torch import Tensor

from attention.kernels.merge import merge_attn_states
from tests.device import DEVICE

# The interpreter truncates where it stores bfloat16.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def sides(num_tokens: int, num_heads: int, channels: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    outputs = [torch.randn(num_tokens, num_heads, channels, device=DEVICE).to(dtype) for _ in range(2)]
    lses = [torch.randn(num_heads, num_tokens, device=DEVICE) * 3 for _ in range(2)]
    return outputs[0], lses[0], outputs[1], lses[1]


def expected(prefix: Tensor, prefix_lse: Tensor, suffix: Tensor, suffix_lse: Tensor) -> Tensor:
    share = torch.sigmoid(prefix_lse.double() - suffix_lse.double()).t()[..., None]
    return prefix.double() * share + suffix.double() * (1 - share)


@pytest.mark.parametrize(("num_heads", "channels"), [(1, 1), (5, 24), (16, 128), (20, 7)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_any_size_and_type_is_merged(dtype: torch.dtype, num_heads: int, channels: int) -> None:
    parts = sides(3, num_heads, channels, dtype)
    out = torch.full_like(parts[0], torch.nan)
    merge_attn_states(*parts, out=out)
    torch.testing.assert_close(out.double(), expected(*parts), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_each_side_and_the_output_may_have_a_type_of_its_own() -> None:
    prefix, prefix_lse, suffix, suffix_lse = sides(4, 3, 8, torch.float32)
    out = torch.empty(4, 3, 8, dtype=torch.float16, device=DEVICE)
    merge_attn_states(prefix, prefix_lse, suffix.bfloat16(), suffix_lse, out=out)
    parts = (prefix, prefix_lse, suffix.bfloat16(), suffix_lse)
    torch.testing.assert_close(out.double(), expected(*parts), atol=2e-3, rtol=2e-3)


def test_views_are_read_and_written_where_they_lie() -> None:
    parts = sides(6, 4, 8, torch.float32)
    wide = torch.full((9, 4, 12), torch.nan, device=DEVICE)
    wide_lse = torch.full((4, 9), torch.nan, device=DEVICE)
    padded_prefix = torch.cat((parts[0], torch.full_like(parts[0], torch.nan)), dim=-1)[..., :8]
    merge_attn_states(padded_prefix, parts[1], *parts[2:], out=wide[2:8, :, :8], lse_HT=wide_lse[:, 2:8])
    torch.testing.assert_close(wide[2:8, :, :8].double(), expected(*parts), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(wide_lse[:, 2:8], torch.logaddexp(parts[1], parts[3]))
    assert wide[[0, 1, 8]].isnan().all()
    assert wide[..., 8:].isnan().all()
    assert wide_lse[:, [0, 1, 8]].isnan().all()


@pytest.mark.parametrize("written", ["prefix", "suffix"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_either_side_may_be_written_over(dtype: torch.dtype, written: str) -> None:
    parts = sides(4000, 128, 128, dtype) if DEVICE == "cuda" else sides(3, 5, 16, dtype)
    out, lse = torch.empty_like(parts[0]), torch.empty_like(parts[1])
    merge_attn_states(*parts, out=out, lse_HT=lse)
    into, into_lse = parts[:2] if written == "prefix" else parts[2:]
    merge_attn_states(*parts, out=into, lse_HT=into_lse)
    assert torch.equal(into, out)
    assert torch.equal(into_lse, lse)


def test_no_tokens_are_no_work() -> None:
    parts = sides(0, 4, 8, torch.float32)
    merge_attn_states(*parts, out=parts[0])
