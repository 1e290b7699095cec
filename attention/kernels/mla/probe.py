"""Compares the Hopper kernels of latent attention with the portable one on small decode steps, also of selected tokens,
and on a few prompt tokens."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attention.kernels.mla import portable
from attention.kernels.mla.merge import merge_splits
from attention.kernels.mla.plan import MLADecodePlan, tile_tokens_of
from baton.tritonlib.hopper_check import Pair

_LATENT, _CHANNELS, _BLOCK_SIZE = 512, 576, 64
# The lengths give whole and partial tiles, requests that workers share, and workers with several requests.
_SEQ_LENS = (200, 64, 1, 130)
_NUM_WORKERS = 4
# Heads are the tensor cores' columns, or their rows where there are many heads.
_HEADS = (16, 64)
# Query tiles of a prompt's tokens 125 to 131 and of another's token 63, in batch-invariant mode: the row of the last
# token, number of tokens, and row of the block table.
_TILE_LENS = (128, 132, 64)
_TILES = ((2, 3, 0), (6, 4, 0), (7, 1, 3))
_PROMPT_TOKENS = 8


def compare_on_hopper(device: torch.device) -> Iterator[Pair]:
    from attention.kernels.mla import gathered, hopper

    yield from compare(device, hopper.launch)
    yield from compare_selected(device, gathered.launch)


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
        plan = _plan(heads, 2 * _NUM_WORKERS, device)
        yield from _pairs(launch, plan, q_RHC, kv_layer, seq_lens, table, None)
    heads = _HEADS[0]
    q_THC = torch.randn(_PROMPT_TOKENS, heads, _CHANNELS, dtype=torch.bfloat16, device=device, generator=numbers)
    plan = _plan(heads, len(_TILES) * _PROMPT_TOKENS, device, split_tiles=2, tile_tokens=tile_tokens_of(heads))
    lens, tiles = (torch.tensor(rows, dtype=torch.int32, device=device) for rows in (_TILE_LENS, _TILES))
    yield from _pairs(launch, plan, q_THC, kv_layer, lens, table, tiles)


def compare_selected(device: torch.device, launch: Callable[..., None]) -> Iterator[Pair]:
    """As `compare`, of a decode step over selected tokens; `launch` has `gathered.launch`'s signature."""
    numbers = torch.Generator(device).manual_seed(0)
    counts = torch.tensor(_SEQ_LENS, dtype=torch.int32, device=device)
    shape = 1, max(_SEQ_LENS), _BLOCK_SIZE, 1, _CHANNELS
    kv_layer = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=numbers)
    chosen_RK = (len(_SEQ_LENS), max(_SEQ_LENS))
    slots_RK = torch.randint(shape[1] * _BLOCK_SIZE, chosen_RK, dtype=torch.int32, device=device, generator=numbers)
    for heads in _HEADS:
        shape_RHC = len(_SEQ_LENS), heads, _CHANNELS
        q_RHC = torch.randn(shape_RHC, dtype=torch.bfloat16, device=device, generator=numbers)
        plan, scale = _plan(heads, 2 * _NUM_WORKERS, device), _CHANNELS**-0.5
        expected_RHL, out_RHL = torch.zeros(2, len(q_RHC), heads, _LATENT, dtype=torch.bfloat16, device=device)
        expected_HR, lse_HR = torch.zeros(2, heads, len(q_RHC), device=device)
        portable.launch(q_RHC, kv_layer, counts, slots_RK, plan, scale, None, expected_RHL, expected_HR, selected=True)
        merge_splits(counts, plan, expected_RHL, expected_HR, None)
        launch(q_RHC, kv_layer, counts=counts, slots=slots_RK, plan=plan, scale=scale, out=out_RHL, lse_HR=lse_HR)
        merge_splits(counts, plan, out_RHL, lse_HR, None)
        yield out_RHL, expected_RHL
        yield lse_HR, expected_HR


def _plan(heads: int, slots: int, device: torch.device, *, split_tiles: int = 0, tile_tokens: int = 1) -> MLADecodePlan:
    return MLADecodePlan(
        num_workers=_NUM_WORKERS,
        split_tiles=split_tiles,
        partial_output=torch.zeros(slots, heads, _LATENT, device=device),
        partial_lse=torch.zeros(slots, heads, device=device),
        hopper=None,
        gathered=None,
        tile_tokens=tile_tokens,
    )


def _pairs(
    launch: Callable[..., None],
    plan: MLADecodePlan,
    q_RHC: Tensor,
    kv_layer: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    tiles: Tensor | None,
) -> Iterator[Pair]:
    num_rows, heads, _ = q_RHC.shape
    device, scale = q_RHC.device, _CHANNELS**-0.5
    expected_RHL, out_RHL = torch.zeros(2, num_rows, heads, _LATENT, dtype=torch.bfloat16, device=device)
    expected_HR, lse_HR = torch.zeros(2, heads, num_rows, device=device)
    portable.launch(q_RHC, kv_layer, seq_lens, table, plan, scale, None, expected_RHL, expected_HR, tiles=tiles)
    merge_splits(seq_lens, plan, expected_RHL, expected_HR, tiles)
    for _ in range(2):  # launches overlap in a step
        launch(
            q_RHC,
            kv_layer,
            seq_lens=seq_lens,
            block_table=table,
            plan=plan,
            scale=scale,
            tiles=tiles,
            out=out_RHL,
            lse_HR=lse_HR,
        )
        merge_splits(seq_lens, plan, out_RHL, lse_HR, tiles)
    yield out_RHL, expected_RHL
    yield lse_HR, expected_HR
