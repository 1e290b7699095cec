"""The tensors of captured steps with attention data parallelism: this rank's decodes, and the places of all decodes.
They are filled from the buffers of all rows, on the device, as the first part of each step.

Legend: R row of the step, A row of any rank in the order of ranks, with padding, N most rows of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.host_to_device import to_device
from attention.metadata import CommonAttentionMetadata
from baton.engine.batch import BatchRow
from baton.engine.device.decode_buffers import DecodeBuffers
from baton.models.layers.parallel import TensorParallel
from baton.models.layers.token_exchange import TokenExchange


@dataclass(frozen=True)
class OwnedBuffers:
    """One rank's part of the decode buffers, with attention data parallelism.

    Attributes:
        exchange: the model's.
        rows: the buffers of all rows.
        own: [N] int64, the row of each of this rank's places; 0 for padding.
        is_padding: [N] bool, of this rank's places.
        padding_lens: [N] int32, the keys of places that are padding: none; one for the first place of a rank without
            rows, so that no backend has to plan attention without any key. Its result is not used.
        rows_A: [A] int64, the row of each place; 0 for padding.
        places: [N] int64, the place of each row in A.
        seq_lens, positions, slot_mapping, table: as in `DecodeBuffers`, of this rank's places.
        seq_lens_host, num_computed_host: [N] int32, read by backends that plan on the host.
    """

    exchange: TokenExchange
    rows: DecodeBuffers
    own: Tensor
    is_padding: Tensor
    padding_lens: Tensor
    rows_A: Tensor
    places: Tensor
    seq_lens: Tensor
    positions: Tensor
    slot_mapping: Tensor
    table: Tensor
    seq_lens_host: NDArray[np.int32]
    num_computed_host: NDArray[np.int32]

    @property
    def parallel(self) -> TensorParallel:
        return self.exchange.parallel

    def num_rows(self, size: int) -> int:
        """Rows of steps with this many rows on each rank, including padding."""
        return min(size * self.parallel.size, self.rows.max_rows)

    def fill(self, rows: Sequence[BatchRow], size: int, *, has_others: bool = False) -> None:
        """Places the rows of a step, after `DecodeBuffers.fill`. Queues copies; the host does not wait.

        Args:
            has_others: this rank has other rows in the step than these decodes.
        """
        owners_R = np.fromiter((row.owner for row in rows), np.int64, len(rows))
        order_R = owners_R.argsort(kind="stable")
        counts = np.bincount(owners_R, minlength=self.parallel.size)
        places_R = np.concatenate([owner * size + np.arange(count) for owner, count in enumerate(counts)])
        own_R = np.flatnonzero(owners_R == self.parallel.rank)
        own, rows_A, places = (np.zeros(len(each), np.int64) for each in (self.own, self.rows_A, self.places))
        own[: len(own_R)], rows_A[places_R], places[order_R] = own_R, order_R, places_R
        is_padding, padding_lens = np.arange(len(own)) >= len(own_R), np.zeros(len(own), np.int32)
        padding_lens[0] = not len(own_R) and not has_others
        targets = (self.own, self.is_padding, self.padding_lens, self.rows_A, self.places)
        copied = to_device((own, is_padding, padding_lens, rows_A, places), self.own.device)
        for target, each in zip(targets, copied, strict=True):
            target.copy_(each)
        host = self.rows.host
        self.seq_lens_host[:], self.num_computed_host[:] = padding_lens, 0
        self.seq_lens_host[: len(own_R)] = host.fields["seq_lens"][own_R]
        self.num_computed_host[: len(own_R)] = host.num_computed[own_R]

    def take_own(self, size: int) -> None:
        """Selects this rank's rows at the start of a step, after their new blocks are placed."""
        own, is_padding, rows = self.own[:size], self.is_padding[:size], self.rows
        lens = rows.seq_lens.index_select(0, own)
        torch.where(is_padding, self.padding_lens[:size], lens, out=self.seq_lens[:size])
        for target, source, padding in (
            (self.positions, rows.positions, 0),
            (self.slot_mapping, rows.slot_mapping, -1),
        ):
            target[:size].copy_(source.index_select(0, own).masked_fill_(is_padding, padding))
        torch.index_select(rows.table, 0, own, out=self.table[:size])

    def common(self, size: int) -> CommonAttentionMetadata:
        """Metadata like `DecodeBuffers.common`, for this rank's places."""
        return CommonAttentionMetadata(
            query_start_loc=self.rows.query_start_loc[: size + 1],
            query_start_loc_cpu=torch.arange(size + 1, dtype=torch.int32),
            seq_lens=self.seq_lens[:size],
            seq_lens_cpu=torch.from_numpy(self.seq_lens_host[:size]),
            num_computed_tokens_cpu=torch.from_numpy(self.num_computed_host[:size]),
            num_reqs=size,
            num_actual_tokens=size,
            max_query_len=1,
            block_table_tensor=self.table[:size],
            slot_mapping=self.slot_mapping[:size],
        )


def new_owned_buffers(rows: DecodeBuffers, exchange: TokenExchange) -> OwnedBuffers:
    """Buffers in which every place is padding."""
    count, device = rows.max_rows, rows.token_ids.device
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    return OwnedBuffers(
        exchange,
        rows,
        own=zeros,
        is_padding=torch.ones(count, dtype=torch.bool, device=device),
        padding_lens=torch.zeros(count, dtype=torch.int32, device=device),
        rows_A=zeros.new_zeros(count * exchange.parallel.size),
        places=zeros.clone(),
        seq_lens=torch.zeros(count, dtype=torch.int32, device=device),
        positions=zeros.clone(),
        slot_mapping=torch.full_like(zeros, -1),
        table=torch.zeros_like(rows.block_table),
        seq_lens_host=np.zeros(count, np.int32),
        num_computed_host=np.zeros(count, np.int32),
    )
