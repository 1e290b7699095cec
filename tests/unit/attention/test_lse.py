"""Merging attention over two sets of keys gives attention over both."""

import pytest
import torch
from torch import Tensor

from attention.lse import merge_attn_states


def attend(q_THD: Tensor, k_SHD: Tensor, v_SHV: Tensor) -> tuple[Tensor, Tensor]:
    scores_HTS = torch.einsum("thd,shd->hts", q_THD, k_SHD)
    return torch.einsum("hts,shv->thv", scores_HTS.softmax(-1), v_SHV), scores_HTS.logsumexp(-1)


@pytest.mark.parametrize("cut", [1, 4, 8])
@pytest.mark.parametrize("magnitude", [1.0, 40.0])
def test_any_cut_of_the_keys_merges_to_the_whole(cut: int, magnitude: float) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 3, 4) * magnitude, torch.randn(9, 3, 4), torch.randn(9, 3, 2)
    merged, lse = merge_attn_states(*attend(q, k[:cut], v[:cut]), *attend(q, k[cut:], v[cut:]))
    whole, whole_lse = attend(q, k, v)
    torch.testing.assert_close(merged, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, whole_lse)


def test_a_side_without_keys_does_not_count() -> None:
    output, lse = torch.randn(2, 3, 4), torch.randn(3, 2)
    nothing, no_keys = torch.randn(2, 3, 4), torch.full((3, 2), -torch.inf)
    for merged, merged_lse in (
        merge_attn_states(nothing, no_keys, output, lse),
        merge_attn_states(output, lse, nothing, no_keys),
    ):
        torch.testing.assert_close(merged, output)
        torch.testing.assert_close(merged_lse, lse)
    merged, merged_lse = merge_attn_states(nothing, no_keys, nothing, no_keys)
    assert not merged.any()
    assert (merged_lse == -torch.inf).all()
