"""Decode attention over a latent cache: all heads of a request's query share each token's latent, and keys are split
among workers.

The latent's first channels are the values, so a token is read once, for all heads and for both products. The keys of
all requests together are divided among a fixed number of workers in equal runs; each worker finds its own run from the
lengths on the device, so that a captured CUDA graph stays balanced for other lengths. For a request that several
workers share, each writes its result to a slot of fixed memory, and a second kernel merges the slots.

Legend: R requests, H heads, L latent channels (keys and values), P rotary channels (keys), C = L + P, B blocks,
N tokens in a block.
"""

from torch import Tensor

from attention.kernels.mla import portable
from attention.kernels.mla.merge import merge_splits
from attention.kernels.mla.plan import MLADecodePlan
from baton.kvcache.fp8 import is_fp8


def mla_decode_attention(
    q_RHC: Tensor,
    kv_layer: Tensor,
    *,
    seq_lens: Tensor,
    block_table: Tensor,
    plan: MLADecodePlan,
    scale: float,
    kv_scale: Tensor | None = None,
    selected: bool = False,
    tiles: Tensor | None = None,
    out: Tensor,
    lse_HR: Tensor | None = None,
) -> None:
    """Attends with each request's query to its keys; a request of length 0 reads nothing and gets output 0.

    Args:
        kv_layer: [1, B, N, 1, C] with any strides; of the queries' type, or fp8.
        seq_lens: [R] int32.
        block_table: [R, blocks] int32; entries past a request's keys are not read.
        selected: the table holds a slot per key instead of blocks.
        tiles: [J, 3] int32, of prompts: the query row of each query tile's last token, the number of its tokens, and
            its row of the block table. `seq_lens` are then [J], the numbers of keys that the last tokens see. None:
            each request has one query.
        kv_scale: float32 scalar of an fp8 cache; ignored for other caches.
        out: [R, H, L]; the first L channels are the values.
        lse_HR: float32, natural; -inf where there are no keys.
    """
    if not len(q_RHC):
        return
    if not selected and plan.hopper is not None and plan.hopper.serves(q_RHC, kv_layer, out.shape[-1]):
        plan.hopper.launch(
            q_RHC,
            kv_layer,
            seq_lens=seq_lens,
            block_table=block_table,
            plan=plan,
            scale=scale,
            tiles=tiles,
            out=out,
            lse_HR=lse_HR,
        )
    elif selected and plan.gathered is not None and plan.gathered.serves(q_RHC, kv_layer, out.shape[-1]):
        plan.gathered.launch(
            q_RHC, kv_layer, counts=seq_lens, slots=block_table, plan=plan, scale=scale, out=out, lse_HR=lse_HR
        )
    else:
        kv_scale = kv_scale if is_fp8(kv_layer) else None
        portable.launch(
            q_RHC, kv_layer, seq_lens, block_table, plan, scale, kv_scale, out, lse_HR, selected=selected, tiles=tiles
        )
    merge_splits(seq_lens, plan, out, lse_HR, tiles)
