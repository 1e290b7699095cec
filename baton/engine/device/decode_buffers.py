"""The tensors that captured decode steps read and write, which never move, and how a step's rows get into them.

Legend: N most rows of a step, C rows whose blocks have changed, B blocks of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attention.host_to_device import to_device
from attention.metadata import CommonAttentionMetadata, block_rectangle
from baton.engine.batch import BatchRow
from baton.engine.device.host_rows import ROWS_MULTIPLE, HostRows
from baton.engine.device.inputs import TABLE_MULTIPLE
from baton.engine.device.step_slot import StepSlot
from baton.engine.sampling.choice import SamplingBuffers
from baton.models.kernels.recurrent.state_rows import StateRows


@dataclass(frozen=True)
class DecodeBuffers:
    """Buffers for one decode step. Its rows come first; the rows after them are padding, with no keys and slot -1.

    Attributes:
        host: the rows as the host writes them.
        inputs: bytes on the device, a copy of `host.memory`: all inputs of a step.
        tokens: [2N] int32: the tokens that the previous step sampled, row by row, then the tokens that the host knows.
            Every step writes its tokens to the first half, also a step outside of a graph.
        token_source: [N] int32, the index in `tokens` of each row's token.
        token_ids: [N] int32, the step's tokens, looked up by the step itself.
        positions, slot_mapping: [N] int64.
        seq_lens: [N] int32.
        query_start_loc: [N + 1] int32, one token for each row.
        table: [N + 1, B] int32; a row keeps its blocks until they are overwritten. No request uses the last row.
        adapters: [N] int32, the slot of each row's adapter; -1 for none.
        state_slots, state_next: [N] int32, as `StateRows` has them; -1 for none.
        next_tokens: [N] int32, the token after each row's, if the host knows it; -1: the step draws it.
        num_slots: [N] int32, the slots of each row's blocks.
        new_block: [M] int32, blocks that rows get with this step; M is fixed and larger than N.
        new_block_place: [M] int64, their flat indices in the table; where there is no new block, in the last row.
        sampling: for `choose_tokens`.
        hidden: [N, D], where a step leaves the states of this rank's rows that the layer that drafts tokens reads;
            None: there is none.
    """

    host: HostRows
    inputs: Tensor
    tokens: Tensor
    token_source: Tensor
    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    adapters: Tensor
    state_slots: Tensor
    state_next: Tensor
    next_tokens: Tensor
    num_slots: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    table: Tensor
    new_block: Tensor
    new_block_place: Tensor
    sampling: SamplingBuffers
    hidden: Tensor | None = None

    @property
    def max_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def sampled(self) -> Tensor:
        """[N] int32, the tokens that the last step sampled."""
        return self.tokens[: self.max_rows]

    @property
    def block_table(self) -> Tensor:
        """[N, B] int32."""
        return self.table[: self.max_rows]

    def common(self, size: int) -> CommonAttentionMetadata:
        """Metadata of steps with this many rows, including padding. It has views, so it stays valid."""
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

    def state_rows(self, size: int) -> StateRows:
        """The recurrent states of steps with this many rows, including padding. It has views, so it stays valid."""
        none, starts = self.state_slots[:0], self.query_start_loc[size : size + 1]
        prompts = none, starts, none, none[:, None], none[:, None]
        next_N = self.state_next[:size]
        return StateRows(
            self.state_slots[:size], self.seq_lens[:size], *prompts, max_prompt_tokens=0, decode_next_N=next_N
        )

    def fill(self, rows: Sequence[BatchRow], *, step: int, slot: StepSlot, prompts: Sequence[BatchRow] = ()) -> None:
        """Writes the rows of a step, one token each. Queues one copy to the device, and another one for rows with very
        many new blocks; the host does not wait.

        Args:
            prompts: rows that follow; only their sampling is written.

        Raises:
            InternalError: too many rows, or a row with too many blocks.
        """
        blocks_C = self.host.take(rows, step=step, prompts=prompts)
        if blocks_C:
            width = max(map(len, blocks_C.values()))
            table = block_rectangle(list(blocks_C.values()), width)
            rows_C, table_CB = to_device((np.array(list(blocks_C), np.int64), table), self.table.device)
            self.table[:, :width].index_copy_(0, rows_C, table_CB)
        slot.inputs_host[:] = self.host.memory
        self.inputs.copy_(slot.inputs, non_blocking=True)

    def place_new_blocks(self) -> None:
        """Completes the block table at the start of a step, because attention plans by it."""
        self.table.view(-1).index_copy_(0, self.new_block_place, self.new_block)

    def look_tokens_up(self, size: int) -> Tensor:
        """[size] int32, the tokens that the step computes."""
        token_ids = self.token_ids[:size]
        torch.index_select(self.tokens, 0, self.token_source[:size], out=token_ids)
        return token_ids.clamp_(min=0)  # NO_TOKEN of a row that has failed


def new_decode_buffers(
    *,
    max_rows: int,
    max_context_tokens: int,
    block_size: int,
    device: torch.device,
    hidden: tuple[int, torch.dtype] | None = None,
) -> DecodeBuffers:
    """Buffers in which every row is padding.

    Args:
        hidden: number and dtype of a hidden state's channels, if steps leave them; None: they do not.
    """
    max_rows = -(-max_rows // ROWS_MULTIPLE) * ROWS_MULTIPLE
    max_blocks = -(-max_context_tokens // block_size)
    width = -(-max_blocks // TABLE_MULTIPLE) * TABLE_MULTIPLE
    host = HostRows(max_rows, max_blocks=max_blocks, table_width=width, block_size=block_size)
    # Sampled tokens lie directly before the host's fields, which begin with the host's tokens: one index finds both.
    sampled_bytes = 4 * max_rows
    memory = torch.zeros(sampled_bytes + len(host.memory), dtype=torch.uint8, device=device)
    inputs = memory[sampled_bytes:]
    inputs.copy_(torch.from_numpy(host.memory))
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
        adapters=on_device["adapters"],
        state_slots=on_device["state_slots"],
        state_next=on_device["state_next"],
        next_tokens=on_device["next_tokens"],
        num_slots=on_device["num_slots"],
        seq_lens=on_device["seq_lens"],
        query_start_loc=torch.arange(max_rows + 1, dtype=torch.int32, device=device),
        table=torch.zeros(max_rows + 1, width, dtype=torch.int32, device=device),
        new_block=on_device["new_block"],
        new_block_place=on_device["new_block_place"],
        sampling=SamplingBuffers(*(on_device[name] for name in SamplingBuffers._fields)),
        hidden=None if hidden is None else torch.zeros(max_rows, hidden[0], dtype=hidden[1], device=device),
    )
