"""Compares the Hopper kernel of prompts in order with the portable one, on a small batch. Their bits must be equal."""

from collections.abc import Callable, Iterator

import torch

from attention.kernels.decode.plan import in_order_tiling, new_decode_plan, new_partials
from attention.kernels.in_order.prompts import launch as launch_portable
from attention.kernels.in_order.prompts import tile_tokens_of
from baton.tritonlib.hopper_check import Pair

_BLOCK_SIZE, _HEADS, _KV_HEADS, _CHANNELS = 16, 4, 2, 128
# A prompt, and one that continues a context, with several units; no length fills its last block or tile.
_QUERY_LENS = (100, 40)
_SEQ_LENS = (100, 333)


def compare_on_hopper(device: torch.device) -> Iterator[Pair]:
    from attention.kernels.in_order import hopper

    return compare(device, hopper.launch)


def compare(device: torch.device, launch: Callable[..., bool | None]) -> Iterator[Pair]:
    """Yields pairs of outputs, without a window and with one: by `launch`, which has `hopper.launch`'s signature, and
    by the portable kernel.

    Raises:
        RuntimeError: bits differ.
    """
    numbers = torch.Generator(device).manual_seed(0)
    num_blocks = -(-max(_SEQ_LENS) // _BLOCK_SIZE)
    shape = 2, num_blocks * len(_SEQ_LENS), _BLOCK_SIZE, _KV_HEADS, _CHANNELS
    kv_layer = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=numbers)
    q_THD = torch.randn(sum(_QUERY_LENS), _HEADS, _CHANNELS, dtype=torch.bfloat16, device=device, generator=numbers)
    given = {
        "query_start_loc": torch.tensor([0, *_QUERY_LENS]).cumsum(0).to(device, torch.int32),
        "seq_lens": torch.tensor(_SEQ_LENS, dtype=torch.int32, device=device),
        "block_table": torch.arange(shape[1], dtype=torch.int32, device=device).flip(0).view(len(_SEQ_LENS), -1),
        "scale": _CHANNELS**-0.5,
    }
    partials = new_partials(max_num_reqs=1, num_workers=1, num_heads=_HEADS, head_size=_CHANNELS, device=device)
    for window in (None, 150):
        plan = new_decode_plan(
            tiling=in_order_tiling(_CHANNELS, kv_layer.dtype, hopper=True),
            max_num_reqs=1,
            num_workers=1,
            partials=partials,
            sliding_window=window,
            split_keys=128,
            tile_tokens=tile_tokens_of(_HEADS // _KV_HEADS),
        )
        ours, expected = torch.zeros_like(q_THD), torch.zeros_like(q_THD)
        launch_portable(q_THD, kv_layer, plan=plan, out=expected, **given)
        if launch(q_THD, kv_layer, plan=plan, sinks_H=None, out=ours, **given) is False:
            raise RuntimeError("the kernel does not take the call")
        yield ours, expected
        if not torch.equal(ours, expected):
            raise RuntimeError("bits differ")
