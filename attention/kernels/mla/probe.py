"""Compares the Hopper and the portable kernel of latent attention on a small decode step."""

from collections.abc import Callable, Iterator

import torch

from attention.kernels.mla import portable
from attention.kernels.mla.merge import merge_splits
from attention.kernels.mla.plan import MLADecodePlan
from baton.tritonlib.hopper_check import Pair

_LATENT, _CHANNELS, _BLOCK_SIZE = 512, 576, 64
# The lengths give whole and partial tiles, requests that workers share, and workers with several requests.
_SEQ_LENS = (200, 64, 1, 130)
_NUM_WORKERS = 4
# Heads are the tensor cores' columns, or their rows where there are many heads.
_HEADS = (16, 64)


def compare_on_hopper(device: torch.device) -> Iterator[Pair]:
    from attention.kernels.mla import hopper

    return compare(device, hopper.launch)


def compare(device: torch.device, launch: Callable[..., None]) -> Iterator[Pair]:
    """Yields pairs of outputs and log-sum-exps: by `launch`, which has `hopper.launch`'s signature, and by the portable
    kernel."""
    numbers = torch.Generator(device).manual_seed(0)
    seq_lens = torch.tensor(_SEQ_LENS, dtype=torch.int32, device=device)
    blocks = -(-max(_SEQ_LENS) // _BLOCK_SIZE)
    shape = 1, blocks * len(_SEQ_LENS), _BLOCK_SIZE, 1, _CHANNELS
    kv_layer = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=numbers)
    table = torch.arange(shape[1], dtype=torch.int32, device=device).flip(0).view(len(_SEQ_LENS), -1)
    for heads in _HEADS:
        shape_RHC = len(_SEQ_LENS), heads, _CHANNELS
        q_RHC = torch.randn(shape_RHC, dtype=torch.bfloat16, device=device, generator=numbers)
        plan = MLADecodePlan(
            num_workers=_NUM_WORKERS,
            split_tiles=0,
            partial_output=torch.zeros(2 * _NUM_WORKERS, heads, _LATENT, device=device),
            partial_lse=torch.zeros(2 * _NUM_WORKERS, heads, device=device),
            hopper=None,
            gathered=None,
        )
        shape_RHL, scale = (len(_SEQ_LENS), heads, _LATENT), _CHANNELS**-0.5
        expected_RHL, out_RHL = torch.zeros(2, *shape_RHL, dtype=torch.bfloat16, device=device)
        expected_HR, lse_HR = torch.zeros(2, heads, len(_SEQ_LENS), device=device)
        portable.launch(q_RHC, kv_layer, seq_lens, table, plan, scale, None, expected_RHL, expected_HR)
        merge_splits(seq_lens, plan, expected_RHL, expected_HR)
        for _ in range(2):  # launches overlap in a step
            launch(
                q_RHC,
                kv_layer,
                seq_lens=seq_lens,
                block_table=table,
                plan=plan,
                scale=scale,
                out=out_RHL,
                lse_HR=lse_HR,
            )
            merge_splits(seq_lens, plan, out_RHL, lse_HR)
        yield out_RHL, expected_RHL
        yield lse_HR, expected_HR
