"""Merging attention over two sets of keys gives attention over both: the plain way, and by the kernel."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attention import lse
from attention.kernels import merge
from tests.device import DEVICE

MERGES = {"plain": lse.merge_attn_states, "kernel": merge.merge_attn_states}
by_either = pytest.mark.parametrize("merge_attn_states", MERGES.values(), ids=MERGES)
Merge = Callable[..., None]


def attend(q_THD: Tensor, k_SHD: Tensor, v_SHV: Tensor) -> tuple[Tensor, Tensor]:
    scores_HTS = torch.einsum("thd,shd->hts", q_THD.double(), k_SHD.double())
    return torch.einsum("hts,shv->thv", scores_HTS.softmax(-1), v_SHV.double()), scores_HTS.logsumexp(-1)


@by_either
@pytest.mark.parametrize("cut", [1, 4, 8])
@pytest.mark.parametrize("magnitude", [1.0, 40.0])
def test_any_cut_of_the_keys_merges_to_the_whole(merge_attn_states: Merge, cut: int, magnitude: float) -> None:
    torch.manual_seed(0)
    q = torch.randn(5, 3, 4, device=DEVICE) * magnitude
    k, v = torch.randn(9, 3, 4, device=DEVICE), torch.randn(9, 3, 2, device=DEVICE)
    out, merged_lse = torch.full((5, 3, 2), torch.nan, device=DEVICE), torch.full((3, 5), torch.nan, device=DEVICE)
    parts = [part.float() for part in (*attend(q, k[:cut], v[:cut]), *attend(q, k[cut:], v[cut:]))]
    merge_attn_states(*parts, out=out, lse_HT=merged_lse)
    whole, whole_lse = attend(q, k, v)
    torch.testing.assert_close(out.double(), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(merged_lse.double(), whole_lse, atol=1e-5, rtol=1e-6)


@by_either
@pytest.mark.parametrize("empty", [-torch.inf, torch.inf])
def test_a_side_without_keys_does_not_count(merge_attn_states: Merge, empty: float) -> None:
    output, its_lse = torch.randn(2, 3, 4, device=DEVICE), torch.randn(3, 2, device=DEVICE)
    nothing, no_keys = torch.full_like(output, torch.nan), torch.full_like(its_lse, empty)
    out, merged_lse = torch.empty_like(output), torch.empty_like(its_lse)
    for sides in ((nothing, no_keys, output, its_lse), (output, its_lse, nothing, no_keys)):
        merge_attn_states(*sides, out=out, lse_HT=merged_lse)
        torch.testing.assert_close(out, output)
        torch.testing.assert_close(merged_lse, its_lse)
    merge_attn_states(nothing, no_keys, nothing, no_keys, out=out, lse_HT=merged_lse)
    assert not out.any()
    assert (merged_lse == -torch.inf).all()


@by_either
@pytest.mark.parametrize("written_over", [0, 2], ids=["prefix", "suffix"])
def test_either_side_can_be_written_over(merge_attn_states: Merge, written_over: int) -> None:
    torch.manual_seed(0)
    sides = [torch.randn(*size, device=DEVICE) for size in ((6, 3, 5), (3, 6), (6, 3, 5), (3, 6))]
    out, merged_lse = torch.empty_like(sides[0]), torch.empty_like(sides[1])
    merge_attn_states(*sides, out=out, lse_HT=merged_lse)
    merge_attn_states(*sides, out=sides[written_over], lse_HT=sides[written_over + 1])
    torch.testing.assert_close(sides[written_over], out)
    torch.testing.assert_close(sides[written_over + 1], merged_lse)


@by_either
def test_the_merge_counts_a_sink_once(merge_attn_states: Merge) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(*size, device=DEVICE) for size in ((5, 3, 4), (9, 3, 4), (9, 3, 2)))
    sinks = torch.randn(3, device=DEVICE)
    parts = [part.float() for part in (*attend(q, k[:4], v[:4]), *attend(q, k[4:], v[4:]))]
    out, merged_lse = torch.empty(5, 3, 2, device=DEVICE), torch.empty(3, 5, device=DEVICE)
    merge_attn_states(*parts, out=out, lse_HT=merged_lse, sinks_H=sinks)
    whole, whole_lse = attend(q, k, v)
    with_sink = torch.logaddexp(whole_lse, sinks.double()[:, None])
    torch.testing.assert_close(merged_lse.double(), with_sink, atol=1e-5, rtol=1e-5)
    expected = whole * torch.exp(whole_lse - with_sink).t()[..., None]
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
