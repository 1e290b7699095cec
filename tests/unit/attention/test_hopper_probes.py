"""The comparisons of attention's Hopper kernels accept right kernels and refuse wrong ones. Portable kernels run in
place of the Hopper kernels, which run on no other device."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attention.blocksparse import BlocksparseParams
from attention.kernels.blocksparse.prefill import blocksparse_prefill, prefill_tiling
from attention.kernels.blocksparse.probe import compare as compare_blocksparse
from attention.kernels.in_order.probe import compare as compare_in_order
from attention.kernels.in_order.prompts import launch as launch_in_order
from attention.kernels.mla import portable as portable_mla
from attention.kernels.mla.probe import compare as compare_mla
from attention.kernels.mla.probe import compare_selected
from attention.kernels.paged import portable
from attention.kernels.paged.call import AttentionCall
from attention.kernels.paged.probe import compare as compare_paged
from baton.tritonlib.hopper_check import HopperKernels, HopperVerdict, check
from tests.device import DEVICE

DEVICE_ = torch.device(DEVICE)
PARAMS = BlocksparseParams(max_seqlen=4096, num_heads=2, num_kv_heads=1, block_size=64, local_blocks=2, vert_stride=3)


def clear_one(out: Tensor) -> None:
    """A mistake in one element of the second token."""
    out[1, 0, 3] = out.abs().max()


def paged(*, wrong: bool) -> HopperVerdict:
    def launch(call: AttentionCall) -> bool:
        portable.launch(call)
        if wrong:
            clear_one(call.out)
        return True

    return check(HopperKernels("paged", lambda device: compare_paged(device, launch)), DEVICE_)


def mla(*, wrong: bool) -> HopperVerdict:
    def launch(q_RHC: Tensor, kv_layer: Tensor, *, out: Tensor, **options: Any) -> None:
        seq_lens, table, plan = options["seq_lens"], options["block_table"], options["plan"]
        scale, lse_HR, tiles = options["scale"], options["lse_HR"], options["tiles"]
        if wrong:
            scale *= 1.5
        portable_mla.launch(q_RHC, kv_layer, seq_lens, table, plan, scale, None, out, lse_HR, tiles=tiles)

    return check(HopperKernels("mla", lambda device: compare_mla(device, launch)), DEVICE_)


def selected(*, wrong: bool) -> HopperVerdict:
    def launch(q_RHC: Tensor, kv_layer: Tensor, *, out: Tensor, **options: Any) -> None:
        counts, slots, plan = options["counts"], options["slots"], options["plan"]
        if wrong:
            slots = slots.flip(0)
        rest = plan, options["scale"], None, out, options["lse_HR"]
        portable_mla.launch(q_RHC, kv_layer, counts, slots, *rest, selected=True)

    return check(HopperKernels("selected", lambda device: compare_selected(device, launch)), DEVICE_)


def blocksparse(*, wrong: bool) -> HopperVerdict:
    def launch(q_THD: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, *, out: Tensor, **options: Any) -> bool:
        given = {name: options[name] for name in ("query_start_loc", "seq_lens", "block_table", "scale")}
        blocksparse_prefill(
            q_THD,
            torch.stack((k_BNHD, v_BNHD)),
            **given,
            max_query_len=len(q_THD),
            params=None if wrong else PARAMS,
            out=out,
            tiling=prefill_tiling(128, torch.bfloat16, direct=False),
        )
        return True

    return check(HopperKernels("sparse", lambda device: compare_blocksparse(device, launch)), DEVICE_)


def in_order(*, wrong: bool) -> HopperVerdict:
    def launch(q_THD: Tensor, kv_layer: Tensor, *, out: Tensor, **options: Any) -> None:
        launch_in_order(q_THD, kv_layer, out=out, **options)
        if wrong:
            out[1, 0, 3] *= 1.01

    return check(HopperKernels("in order", lambda device: compare_in_order(device, launch)), DEVICE_)


@pytest.mark.parametrize("probe", [paged, mla, selected, blocksparse, in_order])
def test_a_right_kernel_passes(probe: Any) -> None:
    assert probe(wrong=False) == HopperVerdict(0.0)


@pytest.mark.parametrize("probe", [paged, mla, selected, blocksparse])
def test_a_wrong_kernel_is_refused(probe: Any) -> None:
    verdict = probe(wrong=True)
    assert not verdict.passed
    assert not verdict.reason


def test_a_kernel_that_does_not_take_the_call_is_refused() -> None:
    verdict = check(HopperKernels("paged", lambda device: compare_paged(device, lambda _: False)), DEVICE_)
    assert not verdict.passed
    assert "does not take the call" in verdict.reason


def test_a_kernel_in_order_with_other_bits_is_refused() -> None:
    verdict = in_order(wrong=True)
    assert not verdict.passed
    assert "bits differ" in verdict.reason
