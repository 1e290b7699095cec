"""What captured decode steps read and write: tensors that stay where they are, and how a step's rows get into them.

Knows neither model nor graphs. Legend: N most rows of a step, C rows whose blocks have changed, B blocks of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.metadata import CommonAttentionMetadata, block_rectangle
from engine.batch import BatchRow
from engine.choice import SamplingBuffers
from engine.host_rows import HostRows
from engine.inputs import TABLE_MULTIPLE

# Triton compiles a kernel anew for a pointer that is not a multiple of 16, and wide loads want more.
_ALIGNMENT = 256


@dataclass(frozen=True)
class DecodeBuffers:
    """The first so many rows are a step's, those behind them are padding: no keys, slot -1.

    Attributes:
        host: the rows as the host writes them.
        inputs: bytes on the device that the host's are copied to: `host.memory`, then blocks on their way.
        tokens: [2N] int32: what the step in front has sampled, row by row, then what the host knows. Every step leaves
            its tokens in the first half, also one that runs outside of a graph.
        token_source: [N] int32, where in `tokens` each row's token lies.
        token_ids: [N] int32, a step's tokens once it has looked them up.
        positions, slot_mapping: [N] int64.
        seq_lens: [N] int32.
        query_start_loc: [N + 1] int32, one token for each row.
        block_table: [N, B] int32; a row keeps its blocks until other ones come.
        sampling: for `choose_tokens`.
    """

    host: HostRows
    inputs: Tensor
    tokens: Tensor
    token_source: Tensor
    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    block_table: Tensor
    sampling: SamplingBuffers

    @property
    def max_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def sampled(self) -> Tensor:
        """[N] int32, the tokens of the last step."""
        return self.tokens[: self.max_rows]

    def common(self, size: int) -> CommonAttentionMetadata:
        """The metadata of steps of that many rows, padding included: views, so it is made once and stays right."""
        return CommonAttentionMetadata(
            query_start_loc=self.query_start_loc[: size + 1],
            query_start_loc_cpu=torch.arange(size + 1, dtype=torch.int32),
            seq_lens=self.seq_lens[:size],
            seq_lens_cpu=torch.from_numpy(self.host.fields["seq_lens"][:size]),
            num_computed_tokens_cpu=torch.from_numpy(self.host.num_computed[:size]),
            num_reqs=size,
            num_actual_tokens=size,
            max_query_len=1,
            block_table_tensor=self.block_table[:size],
            slot_mapping=self.slot_mapping[:size],
        )

    def fill(self, rows: Sequence[BatchRow], *, step: int) -> None:
        """Makes these the rows of that step, of one token each. One copy behind what is queued; the host does not wait.

        Raises:
            InternalError: more rows, or longer ones, than there is room for.
        """
        changed = self.host.take(rows, step=step)
        parts: list[NDArray[Any]] = [self.host.memory]
        if changed:
            table = block_rectangle(list(changed.values()), max(map(len, changed.values())))
            parts += [np.array(list(changed), np.int64), table.reshape(-1)]
        starts = self._copy(parts)
        if changed:
            rows_C = self.inputs[starts[1] :][: parts[1].nbytes].view(torch.int64)
            table_CB = self.inputs[starts[2] :][: parts[2].nbytes].view(torch.int32).view(table.shape)
            self.block_table[:, : table.shape[1]].index_copy_(0, rows_C, table_CB)
            self.host.copied(changed)

    def _copy(self, parts: Sequence[NDArray[Any]]) -> list[int]:
        """Copies the parts to `inputs`, and returns where each begins."""
        starts, size = [], 0
        for part in parts:
            starts.append(size)
            size += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        # New memory each time: torch keeps pinned memory that nothing refers to until the copy out of it is done.
        staged = torch.empty(size, dtype=torch.uint8, pin_memory=self.inputs.is_cuda)
        host = staged.numpy()
        for start, part in zip(starts, parts, strict=True):
            host[start : start + part.nbytes] = part.view(np.uint8)
        self.inputs[:size].copy_(staged, non_blocking=True)
        return starts


def new_decode_buffers(
    *, max_rows: int, max_context_tokens: int, block_size: int, device: torch.device
) -> DecodeBuffers:
    """Buffers in which every row is padding."""
    max_rows = -(-max_rows * 4 // _ALIGNMENT) * _ALIGNMENT // 4
    max_blocks = -(-max_context_tokens // block_size)
    host = HostRows(max_rows, max_blocks=max_blocks, block_size=block_size)
    room_for_blocks = max_rows * (8 + 4 * max_blocks) + _ALIGNMENT
    # What a step samples lies in front of what the host writes, which begins with the host's tokens: one range to look
    # tokens up in.
    sampled_bytes = 4 * max_rows
    memory = torch.zeros(sampled_bytes + len(host.memory) + room_for_blocks, dtype=torch.uint8, device=device)
    inputs = memory[sampled_bytes:]
    inputs[: len(host.memory)].copy_(torch.from_numpy(host.memory))
    on_device: dict[str, Tensor] = {}
    start = 0
    for name, values in host.fields.items():
        on_device[name] = inputs[start : start + values.nbytes].view(torch.from_numpy(values).dtype)
        start += values.nbytes
    return DecodeBuffers(
        host=host,
        inputs=inputs,
        tokens=memory[: 2 * sampled_bytes].view(torch.int32),
        token_source=on_device["token_source"],
        token_ids=torch.zeros(max_rows, dtype=torch.int32, device=device),
        positions=on_device["positions"],
        slot_mapping=on_device["slot_mapping"],
        seq_lens=on_device["seq_lens"],
        query_start_loc=torch.arange(max_rows + 1, dtype=torch.int32, device=device),
        block_table=torch.zeros(
            max_rows, -(-max_blocks // TABLE_MULTIPLE) * TABLE_MULTIPLE, dtype=torch.int32, device=device
        ),
        sampling=SamplingBuffers(*(on_device[name] for name in SamplingBuffers._fields)),
    )
