"""Sparse attention of latent models in plain torch, the twin of `attention.kernels.sparse`: the tokens that each query
sees, and the selection of those to which it attends.

Every query of a decode or a prompt is a row. Nothing here reads device values on the host, so a CUDA graph can capture
the selection. Legend: T queries, S keys, K selected keys, H heads, D channels, R requests.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.host_to_device import to_device
from attention.metadata import CommonAttentionMetadata


@dataclass(frozen=True)
class SparseQueries:
    """Queries of consecutive requests that attend to selected tokens.

    Attributes:
        seq_lens_T: int32, number of tokens that each query sees, its own included; 0 for padding.
        counts_T: int32, number of tokens that each query attends to.
        requests_T: int32, each query's row of the block table.
        block_table: [R, blocks] int32.
        max_keys: an upper bound of `seq_lens_T` that the host knows.
        width: an upper bound of `counts_T` that the host knows.
        ranges: (start, stop, tokens that the last query sees) of each request's queries; () where the host does not
            know them.
    """

    seq_lens_T: Tensor
    counts_T: Tensor
    requests_T: Tensor
    block_table: Tensor
    max_keys: int
    width: int
    ranges: tuple[tuple[int, int, int], ...] = ()

    def pieces(self, num_queries: int) -> Iterator[tuple[int, "SparseQueries"]]:
        """Yields these queries in runs of at most `num_queries`, each with the index of its first query."""
        for start in range(0, len(self.counts_T), num_queries):
            stop = min(start + num_queries, len(self.counts_T))
            rows = slice(start, stop)
            yield (
                start,
                replace(
                    self,
                    seq_lens_T=self.seq_lens_T[rows],
                    counts_T=self.counts_T[rows],
                    requests_T=self.requests_T[rows],
                    ranges=tuple(_cut(each, start, stop) for each in self.ranges),
                ),
            )


@dataclass(frozen=True)
class Selected:
    """The tokens that a layer selected in a step, as slots [T, K] int32 for decodes and for prefills; None: they attend
    to all tokens."""

    decodes: Tensor | None
    prefills: Tensor | None


NOTHING_SELECTED = Selected(None, None)


def _cut(of_request: tuple[int, int, int], start: int, stop: int) -> tuple[int, int, int]:
    """Returns a request's range within the queries [start, stop), counted from `start`; empty outside of them."""
    first, last = max(of_request[0], start), min(of_request[1], stop)
    return (first - start, last - start, of_request[2] - (of_request[1] - last)) if first < last else (0, 0, 0)


def sparse_decodes(
    common: CommonAttentionMetadata, num_decodes: int, *, block_size: int, top_k: int, always: bool, on_host: bool
) -> SparseQueries | None:
    """Returns the decodes of a batch; None if no block table is wider than `top_k` tokens, because no query can then
    see more.

    It reads no lengths unless `on_host`, so that a captured step is right for any lengths.

    Args:
        always: select even if every token is selected, because results must not depend on other requests.
        on_host: the batch is in CPU memory.
    """
    block_table = common.block_table_tensor[:num_decodes]
    max_keys = block_table.shape[1] * block_size
    if not top_k or not num_decodes or (max_keys <= top_k and not always):
        return None
    seq_lens_T = common.seq_lens[:num_decodes]
    ranges: tuple[tuple[int, int, int], ...] = ()
    if on_host:
        ranges = tuple((row, row + 1, seq_len) for row, seq_len in enumerate(seq_lens_T.tolist()))
    return SparseQueries(
        seq_lens_T=seq_lens_T,
        counts_T=seq_lens_T.clamp(max=top_k),
        requests_T=torch.arange(num_decodes, dtype=torch.int32, device=block_table.device),
        block_table=block_table,
        max_keys=max_keys,
        width=min(top_k, max_keys),
        ranges=ranges,
    )


def sparse_prefills(
    common: CommonAttentionMetadata, num_decodes: int, *, top_k: int, always: bool
) -> SparseQueries | None:
    """Returns the prefills of a batch; None if none of their queries sees more than `top_k` tokens.

    Args:
        always: as in `sparse_decodes`.
    """
    seq_lens_R = common.seq_lens_cpu[num_decodes : common.num_reqs].numpy()
    if not top_k or not len(seq_lens_R) or (seq_lens_R.max() <= top_k and not always):
        return None
    starts_R = common.query_start_loc_cpu[num_decodes : common.num_reqs + 1].numpy()
    starts_R = starts_R - starts_R[0]
    query_lens_R = np.diff(starts_R)
    seq_lens_T = _seen(query_lens_R, seq_lens_R)
    arrays = (
        seq_lens_T,
        np.minimum(seq_lens_T, top_k),
        np.repeat(np.arange(len(seq_lens_R), dtype=np.int32), query_lens_R),
    )
    seen, counts_T, requests_T = to_device(
        [array.astype(np.int32) for array in arrays], common.block_table_tensor.device
    )
    max_keys = int(seq_lens_R.max())
    return SparseQueries(
        seq_lens_T=seen,
        counts_T=counts_T,
        requests_T=requests_T,
        block_table=common.block_table_tensor[num_decodes:],
        max_keys=max_keys,
        width=min(top_k, max_keys),
        ranges=tuple(zip(starts_R[:-1].tolist(), starts_R[1:].tolist(), seq_lens_R.tolist(), strict=True)),
    )


def _seen(query_lens_R: NDArray[np.int32], seq_lens_R: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns how many tokens each query sees: a request's last query sees all of its tokens, the query before it all
    but one."""
    stops_R = np.cumsum(query_lens_R)
    behind_T = np.repeat(stops_R, query_lens_R) - np.arange(int(stops_R[-1])) - 1
    return (np.repeat(seq_lens_R, query_lens_R) - behind_T).astype(np.int32)


def index_scores(q_THD: Tensor, weights_TH: Tensor, k_SD: Tensor) -> Tensor:
    """Returns [T, S] float32, the sum over heads of weight * relu(q.k)."""
    # NOTE: copied, because a CPU's library may choose its method by address, so bits would depend on the rows before.
    dots_THS = torch.matmul(q_THD.to(torch.float32, copy=True), k_SD.float().t()).relu_()
    return torch.matmul(weights_TH.clone().unsqueeze(1), dots_THS).squeeze(1)


def best_keys(scores_TS: Tensor, seq_lens_T: Tensor, top_k: int) -> Tensor:
    """Returns the positions [T, K] int32 of the best `top_k` scores of each row, ascending; among equal scores the
    first win. K is the smaller of `top_k` and S, and -1 fills rows that see fewer.

    A threshold decides, not the order in which a sort returns equal scores, so the result is the same in any batch.
    """
    num_keys = scores_TS.shape[1]
    width = min(top_k, num_keys)
    positions_S = torch.arange(num_keys, dtype=torch.int32, device=scores_TS.device)
    seen_TS = positions_S < seq_lens_T.unsqueeze(1)
    scores_TS = scores_TS.masked_fill(~seen_TS, -torch.inf)
    least_T1 = scores_TS.topk(width, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above_TS, equal_TS = scores_TS > least_T1, scores_TS == least_T1
    room_T1 = width - above_TS.sum(-1, keepdim=True)
    kept_TS = (above_TS | (equal_TS & (equal_TS.cumsum(-1) <= room_T1))) & seen_TS
    places_TS = torch.where(kept_TS, kept_TS.cumsum(-1) - 1, width)
    best = scores_TS.new_full((len(scores_TS), width + 1), -1, dtype=torch.int32)
    best.scatter_(1, places_TS, positions_S.expand_as(places_TS))
    return best[:, :width]


def slots_of(positions_TK: Tensor, table_TB: Tensor, block_size: int) -> Tensor:
    """Returns the slots [T, K] int32 of positions in each query's own row of blocks; -1 stays -1."""
    blocks_TK = table_TB.gather(1, positions_TK.clamp(min=0).long() // block_size)
    return torch.where(positions_TK < 0, -1, blocks_TK * block_size + positions_TK % block_size)
