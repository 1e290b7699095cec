"""Short chunks of a prompt over a long context, 32 query heads on 8 of 128 channels: keys split among programs and not.

The first token of a cached prompt waits for such a chunk. Rows are tokens of the chunk. "as chosen" is what
`attention.kernels.paged.split` chooses by its estimate.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from attention.kernels.paged.attend import unified_attention
from attention.kernels.paged.split import SplitLayer, choose_splits
from attention.metadata import CommonAttentionMetadata
from attention.platform import Platform
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheSpec, KVKind
from bench.attention.batches import Lengths, attend, checked_rows, keys_of, make_cache, make_common
from bench.attention.figures import MAX_ERROR
from bench.attention.gqa import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, SCALE
from bench.attention.measure import Ceilings, microseconds, relative_error, turns
from bench.table import Row

_ROWS = (16, 64, 128, 256, 512)
_KEYS = (1024, 2048, 4096, 8192, 32768, 131072)
_SPLITS = (2, 4, 8, 16, 32)
_BLOCK_SIZE = 16
# What is chosen may be so much slower than unsplit keys: what measurements differ by.
_GOAL_SHARE = 0.97


def run(platform: Platform, machine: Ceilings, progress: Callable[[str], None]) -> Iterator[Row]:
    for num_keys in _KEYS:
        for num_rows in _ROWS:
            if num_rows >= num_keys:
                continue
            progress(f"attention: {num_rows} rows over {num_keys} keys")
            yield from _rows_of(Lengths(1, num_rows, num_keys - num_rows), platform, machine)


def _rows_of(lengths: Lengths, platform: Platform, machine: Ceilings) -> Iterator[Row]:
    layer = SplitLayer(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, platform.num_sms)
    num_tokens, num_keys = lengths.num_tokens, lengths.seq_len
    chosen = choose_splits(layer, num_tokens=num_tokens, num_reqs=1, batch_tokens=num_tokens, num_keys=num_keys)
    us_of = _measure(lengths, sorted({1, chosen, *_SPLITS}))
    work = f"{num_tokens} rows over {num_keys} keys"
    whole_us = us_of[1]
    for splits, us in us_of.items():
        name = "chunk over a context, unsplit" if splits == 1 else f"chunk over a context, {splits} splits"
        yield Row(name, work, us, "us", "unsplit", whole_us, less_is_better=True)
    name = f"chunk over a context, as chosen ({chosen})"
    yield Row(name, work, us_of[chosen], "us", "unsplit", whole_us, _GOAL_SHARE, less_is_better=True)
    kv_bytes = num_keys * 2 * NUM_KV_HEADS * HEAD_DIM * 2
    yield Row("read of these keys", work, kv_bytes / machine.copy_gigabytes_per_s / 1e3, "us")


def _measure(lengths: Lengths, all_splits: list[int]) -> dict[int, float]:
    """Microseconds of one layer by number of splits.

    Raises:
        SystemExit: a result is wrong.
    """
    common = make_common(lengths, _BLOCK_SIZE)
    layer_bytes = lengths.seq_len * 2 * NUM_KV_HEADS * HEAD_DIM * 2
    spec = KVCacheSpec(KVKind.GQA, turns(layer_bytes), NUM_KV_HEADS, HEAD_DIM, "bfloat16")
    cache = make_cache(spec, lengths, _BLOCK_SIZE, KVCacheLayout.NHD)
    q = torch.randn(lengths.num_tokens, NUM_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    ((_, rows),) = checked_rows(lengths)
    expected = attend(q[rows], *keys_of(cache.layer(0), common, 0, lengths.seq_len), scale=SCALE)
    us_of: dict[int, float] = {}
    for splits in all_splits:
        out = torch.full_like(q, math.nan)
        call = partial(_attend, q, cache, common, splits, out)
        call(0)
        if not relative_error(out[rows], expected) < MAX_ERROR:
            raise SystemExit(f"bench: {splits} splits are wrong: {lengths.num_tokens} rows over {lengths.seq_len} keys")
        us_of[splits] = microseconds([partial(call, layer) for layer in range(spec.num_layers)])
    return us_of


def _attend(
    q_THD: Tensor, cache: PagedKVCache, common: CommonAttentionMetadata, splits: int, out: Tensor, layer: int
) -> None:
    unified_attention(
        q_THD,
        cache.layer(layer),
        query_start_loc=common.query_start_loc,
        seq_lens=common.seq_lens,
        block_table=common.block_table_tensor,
        max_query_len=common.max_query_len,
        scale=SCALE,
        out=out,
        splits=splits,
    )
