"""Compares the Hopper kernels of attention over a batch with the portable kernel, on a small batch."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from attention.kernels.paged import portable
from attention.kernels.paged.call import AttentionCall, KernelFeatures, Keys
from attention.kernels.paged.split import LEAST_KEYS
from attention.kernels.paged.work_list import WorkList, list_work
from baton.tritonlib.hopper_check import Pair

_BLOCK_SIZE, _HEADS, _KV_HEADS, _CHANNELS = 16, 4, 2, 128
# A prompt, two prompts that continue a context, and a decode; no length fills its last block or tile. The contexts are
# long enough to be split, one of them among the queries of a tile.
_QUERY_LENS = (100, 40, 40, 1)
_SEQ_LENS = (100, LEAST_KEYS + 333, LEAST_KEYS + 20, 77)
_TILE_TOKENS = 128 * _KV_HEADS // _HEADS


def compare_on_hopper(device: torch.device) -> Iterator[Pair]:
    from attention.kernels.paged import hopper, persistent

    def launch_persistent(call: AttentionCall) -> bool:
        return persistent.launch(call, _work_of(call))

    def launch_split(call: AttentionCall) -> bool:
        return hopper.launch(replace(call, splits=3))

    return compare(device, hopper.launch, launch_split, launch_persistent)


def compare(device: torch.device, *launches: Callable[[AttentionCall], bool]) -> Iterator[Pair]:
    """Yields pairs of outputs and log-sum-exps: of each launch and of the portable kernel."""
    expected = _small_call(device)
    portable.launch(expected)
    for launch in launches:
        call = replace(
            expected, out=torch.zeros_like(expected.out), lse_HT=torch.zeros(_HEADS, sum(_QUERY_LENS), device=device)
        )
        # Each runs twice, so that the second launch meets whatever the first left in memory.
        for _ in range(2):
            if not launch(call):
                raise RuntimeError("a kernel does not take the call")
        yield call.out, expected.out
        if call.lse_HT is not None and expected.lse_HT is not None:
            yield call.lse_HT, expected.lse_HT


def _small_call(device: torch.device) -> AttentionCall:
    numbers = torch.Generator(device).manual_seed(0)
    num_tokens, num_blocks = sum(_QUERY_LENS), -(-max(_SEQ_LENS) // _BLOCK_SIZE)
    query_start_loc = torch.tensor([0, *_QUERY_LENS]).cumsum(0).to(device, torch.int32)
    shape = 2, num_blocks * len(_SEQ_LENS), _BLOCK_SIZE, _KV_HEADS, _CHANNELS
    k, v = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=numbers).unbind(0)
    q_THD = torch.randn(num_tokens, _HEADS, _CHANNELS, dtype=torch.bfloat16, device=device, generator=numbers)
    return AttentionCall(
        q_THD,
        Keys(
            k,
            v,
            key_start_loc=None,
            seq_lens=torch.tensor(_SEQ_LENS, dtype=torch.int32, device=device),
            block_table=torch.arange(shape[1], dtype=torch.int32, device=device).flip(0).view(len(_SEQ_LENS), -1),
            expected_len=max(_SEQ_LENS),
        ),
        query_start_loc=query_start_loc,
        max_query_len=max(_QUERY_LENS),
        scale=_CHANNELS**-0.5,
        features=KernelFeatures(),
        out=torch.zeros_like(q_THD),
        lse_HT=torch.zeros(_HEADS, num_tokens, device=device),
    )


def _work_of(call: AttentionCall) -> WorkList:
    assert call.keys.seq_lens is not None
    return list_work(
        call.query_start_loc,
        call.keys.seq_lens,
        num_tokens=call.q_THD.shape[0],
        tokens=_TILE_TOKENS,
        num_programs=3,  # each takes several tiles
    )
