"""Decodes in order equal attention by its definition for any features, with keys on either axis of the products, and a
request has the same bits alone and in any batch."""

from itertools import pairwise
from typing import Literal

import pytest
import torch

from tests.device import DEVICE
from tests.unit.attention.in_order import attend_in_order, in_order_plan
from tests.unit.attention.paged import Asked, Decodes, decodes
from tests.unit.attention.test_decode_kernel import ASKED, SINKS_H, TOLERANCE, relative_error

# Lengths around the edges of tiles of 16 keys.
RAGGED = [33, 16, 0, 70]
Axis = Literal[0, 1]
AXES: tuple[Axis, ...] = (0, 1)


def check(batch: Decodes, keys_axis: Axis, asked: Asked | None = None, *, split_tiles: int = 1) -> None:
    asked = asked or Asked()
    plan = in_order_plan(batch, asked, rows=len(batch.seq_lens), split_tiles=split_tiles)
    out = attend_in_order(batch, asked, plan, keys_axis=keys_axis)
    assert relative_error(out, batch.expected(asked)[0]) < TOLERANCE[batch.q_RHD.dtype]
    assert not out[batch.seq_lens.cpu() == 0].any()


@pytest.mark.parametrize("keys_axis", AXES)
@pytest.mark.parametrize("asked", [Asked(), *ASKED.values()], ids=["plain", *ASKED])
def test_any_feature_is_computed(asked: Asked, keys_axis: Axis) -> None:
    check(decodes(RAGGED, asked=asked), keys_axis, asked)
    check(decodes(RAGGED, asked=asked), keys_axis, asked, split_tiles=2)


@pytest.mark.parametrize("keys_axis", AXES)
@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (20, 1), (66, 1)])
def test_query_heads_share_kv_heads_in_any_group(heads: tuple[int, int], keys_axis: Axis) -> None:
    check(decodes([20, 3], num_heads=heads[0], num_kv_heads=heads[1]), keys_axis)


@pytest.mark.parametrize("keys_axis", AXES)
@pytest.mark.parametrize(("head_size", "block_size"), [(8, 1), (24, 12), (80, 128)])
def test_any_head_and_block_size_is_computed(head_size: int, block_size: int, keys_axis: Axis) -> None:
    check(decodes([33, 5], head_size=head_size, block_size=block_size), keys_axis)


@pytest.mark.parametrize("keys_axis", AXES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_any_dtype_is_computed(dtype: torch.dtype, keys_axis: Axis) -> None:
    check(decodes([150, 64, 0, 3], dtype=dtype), keys_axis)


@pytest.mark.parametrize("keys_axis", AXES)
@pytest.mark.parametrize(
    ("cache_dtype", "dtype"),
    [
        (torch.float8_e4m3fn, torch.float32),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.float8_e5m2, torch.float16),
    ],
)
def test_caches_of_eight_bits_are_read(cache_dtype: torch.dtype, dtype: torch.dtype, keys_axis: Axis) -> None:
    batch = decodes([150, 3], dtype=dtype, cache_dtype=cache_dtype, k_scale=0.5, v_scale=0.25)
    k_scale, v_scale = torch.tensor([0.5, 0.25], device=DEVICE)
    plan = in_order_plan(batch, Asked(), rows=2)
    out = attend_in_order(batch, Asked(), plan, keys_axis=keys_axis, k_scale=k_scale, v_scale=v_scale)
    assert relative_error(out, batch.expected(Asked())[0]) < TOLERANCE[dtype]


def test_sinks_of_a_request_without_keys_give_zeros() -> None:
    asked = Asked(sinks_H=SINKS_H)
    check(decodes([0, 3]), 0, asked)


@pytest.mark.parametrize("asked", [Asked(), ASKED["window of 17"], ASKED["all"]], ids=["plain", "window of 17", "all"])
@pytest.mark.parametrize("max_splits", [0, 2])
def test_a_request_has_the_same_bits_alone_and_in_any_batch(asked: Asked, max_splits: int) -> None:
    batch = decodes([50, 16, 0, 130, 97], asked=asked)
    plan = in_order_plan(batch, asked, rows=5, max_splits=max_splits)
    together = attend_in_order(batch, asked, plan)
    assert relative_error(together, batch.expected(asked)[0]) < TOLERANCE[torch.float32]
    for request in range(5):
        rows = slice(request, request + 1)
        one = Decodes(batch.q_RHD[rows], batch.kv_layer, batch.seq_lens[rows], batch.block_table[rows], [], [])
        plan = in_order_plan(one, asked, rows=1, num_workers=5, max_splits=max_splits)
        assert torch.equal(attend_in_order(one, asked, plan), together[rows])


def test_a_bound_on_the_splits_makes_those_of_long_requests_longer() -> None:
    batch = decodes([50, 16, 0, 130, 97], num_heads=64, num_kv_heads=1)
    plan = in_order_plan(batch, Asked(), rows=5, max_splits=2)
    plan.fill(batch.seq_lens)
    starts = plan.unit_starts.tolist()
    assert all(stop - start <= 3 for start, stop in pairwise(starts))
    assert starts == [0, 2, 3, 3, 5, 7]  # of 32, 16, 80 and 64 keys
