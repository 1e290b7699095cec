"""Compares the Hopper and the portable kernel of block-sparse attention on small prompts."""

from collections.abc import Callable, Iterator

import torch

from attention.blocksparse import BlocksparseParams
from attention.kernels.blocksparse.pattern import kernel_pattern
from attention.kernels.blocksparse.prefill import blocksparse_prefill, prefill_tiling
from baton.tritonlib.hopper_check import Pair

_BLOCK_SIZE, _HEADS, _KV_HEADS, _CHANNELS = 16, 2, 1, 128
_PARAMS = BlocksparseParams(
    max_seqlen=4096, num_heads=_HEADS, num_kv_heads=_KV_HEADS, block_size=64, local_blocks=2, vert_stride=3
)
# The second prompt continues a context. Both have keys that some heads do not see.
_QUERY_LENS, _SEQ_LENS = (300, 40), (300, 330)
_NUM_PROGRAMS = 3  # each takes several tiles


def compare_on_hopper(device: torch.device) -> Iterator[Pair]:
    from attention.kernels.blocksparse import hopper

    return compare(device, hopper.launch)


def compare(device: torch.device, launch: Callable[..., bool]) -> Iterator[Pair]:
    """Yields pairs of outputs: by `launch`, which has `hopper.launch`'s signature, and by the portable kernel."""
    numbers = torch.Generator(device).manual_seed(0)
    query_start_loc = torch.tensor([0, *_QUERY_LENS]).cumsum(0).to(device, torch.int32)
    seq_lens = torch.tensor(_SEQ_LENS, dtype=torch.int32, device=device)
    blocks = -(-max(_SEQ_LENS) // _BLOCK_SIZE)
    shape = 2, blocks * len(_SEQ_LENS), _BLOCK_SIZE, _KV_HEADS, _CHANNELS
    kv_layer = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=numbers)
    table = torch.arange(shape[1], dtype=torch.int32, device=device).flip(0).view(len(_SEQ_LENS), -1)
    shape_THD = sum(_QUERY_LENS), _HEADS, _CHANNELS
    q_THD = torch.randn(shape_THD, dtype=torch.bfloat16, device=device, generator=numbers)
    expected, actual = torch.zeros_like(q_THD), torch.zeros_like(q_THD)
    blocksparse_prefill(
        q_THD,
        kv_layer,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=table,
        max_query_len=max(_QUERY_LENS),
        scale=_CHANNELS**-0.5,
        params=_PARAMS,
        out=expected,
        tiling=prefill_tiling(_CHANNELS, torch.bfloat16, direct=False),
    )
    taken = launch(
        q_THD,
        *kv_layer.unbind(0),
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=table,
        scale=_CHANNELS**-0.5,
        pattern=kernel_pattern(_PARAMS),
        out=actual,
        num_sms=_NUM_PROGRAMS,
    )
    if not taken:
        raise RuntimeError("the kernel does not take the call")
    yield actual, expected
