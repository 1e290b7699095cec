"""The tensors that captured steps with prompts read and write, in addition to those of decodes, and how a step's rows
get into them.

The decodes of a step are in the decodes' buffers; here are all tokens in a row: decodes, prompts, padding. With
attention data parallelism, all but tokens and hidden states is of this rank's rows. Legend: T most tokens of a step, P
most requests with prompts and one for padding, N most rows, B blocks of a row, A token of any rank in the order of
ranks, with padding; without attention data parallelism these are the step's tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention.host_to_device import to_device
from attention.metadata import CommonAttentionMetadata, PaddedBatch, plan_batch
from baton.core.errors import InternalError
from baton.engine.batch import MOST_SNAPSHOTS, BatchRow
from baton.engine.device.decode_buffers import DecodeBuffers
from baton.engine.device.inputs import TABLE_MULTIPLE, count_decodes, place_rows, snapshots_of
from baton.engine.device.owned_buffers import OwnedBuffers
from baton.engine.device.step_slot import StepSlot
from baton.models.kernels.recurrent.state_rows import StateRows

# A bucket has room for one prompt per this many tokens, and for a few at least. Rows for prompts that a step lacks cost
# programs of the attention kernel that find nothing to do.
_TOKENS_PER_PROMPT = 16
_LEAST_PROMPTS = 8
# Triton compiles a kernel again for a pointer that is not a multiple of 16, and wide loads need more.
_ALIGN_BYTES = 256
_SNAPSHOTS = ("snapshot_slots", "snapshot_lens")
_TORCH_DTYPES = MappingProxyType({np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64})


def most_prompts(num_tokens: int) -> int:
    """The most prompts in a step of this many tokens, including padding."""
    return max(_LEAST_PROMPTS, num_tokens // _TOKENS_PER_PROMPT)


class FilledRows(NamedTuple):
    """The rows of the step in the buffers.

    Attributes:
        num_decodes, num_prompts: of the rows whose attention this rank computes.
        starts: place of each row's first token among `hidden`, of all rows.
    """

    num_decodes: int
    num_prompts: int
    starts: Sequence[int]


@dataclass(frozen=True)
class PromptBuffers:
    """The tensors that captured steps with prompts read and write, which never move.

    Attributes:
        decodes: buffers of all ranks' decodes.
        owned: those of this rank's decodes; None without attention data parallelism.
        inputs: bytes on the device: the following fields of a step.
        given: [A] int32, the tokens that the host knows; any number at a decode's place.
        decode_rows: [A] int32, the row of each decode's place; -1 elsewhere. Read only with `owned`.
        positions, slot_mapping: [T] int64; 0 and -1 for padding.
        adapters: [T] int32, the slot of each token's adapter; -1 for none and for padding.
        query_start_loc: [P + 1] int32, see `PaddedBatch`.
        seq_lens: [P] int32; 0 for padding.
        context: [P] int32, tokens of each prompt before those of the step.
        state_slots: [P] int32, the slot of each prompt's recurrent state; -1 for none and for padding.
        snapshot_slots, snapshot_lens: [P, M] int32, see `StateRows`; -1 and anything for none and for padding.
        last: [N] int64, the place in A of the last token of each row of the step.
        table: [P, B] int32; rows and columns that a step does not use hold anything.
        token_ids: [A] int32, the step's tokens, put together by the step itself.
        hidden: [A, D], the step's hidden states.
        places: where each field is in `inputs`.
        max_requests: most rows of a step.
    """

    decodes: DecodeBuffers
    owned: OwnedBuffers | None
    inputs: Tensor
    given: Tensor
    decode_rows: Tensor
    positions: Tensor
    slot_mapping: Tensor
    adapters: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    context: Tensor
    state_slots: Tensor
    snapshot_slots: Tensor
    snapshot_lens: Tensor
    last: Tensor
    table: Tensor
    token_ids: Tensor
    hidden: Tensor
    places: Mapping[str, tuple[slice, np.dtype[Any]]]
    block_size: int
    max_requests: int

    @property
    def max_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def ranks(self) -> int:
        """Ranks that have tokens of their own; 1 without attention data parallelism."""
        return 1 if self.owned is None else self.owned.parallel.size

    def most_decodes(self, size: int) -> int:
        """The most decodes of this rank in a step of `size` tokens."""
        return min(size, self.max_requests)

    def all_decodes(self, size: int) -> int:
        """The most decodes of all ranks in a step of `size` tokens on each."""
        return min(size * self.ranks, self.max_requests)

    def fill(self, rows: Sequence[BatchRow], size: int, *, step: int, slot: StepSlot) -> FilledRows:
        """Writes the rows of a step, which is padded to `size` tokens on each rank. Queues two copies to the device,
        and others for prompts' blocks and for decodes with very many new blocks; the host does not wait.

        Args:
            rows: those of one token each come first; all others are prompts.

        Raises:
            InternalError: too many rows or tokens, or a row with too few blocks or too many; nothing is written then.
        """
        placed = place_rows(rows, None if self.owned is None else self.owned.exchange, width=size)
        own = () if placed.is_idle else placed.own
        num_decodes, all_decodes = count_decodes(own), count_decodes(rows)
        prompts, num_tokens = own[num_decodes:], sum(len(row.token_ids) for row in own)
        batch = None
        if prompts:
            batch = plan_batch(
                query_lens=[len(row.token_ids) for row in prompts],
                context_lens=[row.token_start for row in prompts],
                block_tables=[row.block_ids for row in prompts],
                block_size=self.block_size,
            )
            _check_width(batch.block_table.shape[1], self.table.shape[1])
        self.decodes.fill(rows[:all_decodes], step=step, slot=slot, prompts=rows[all_decodes:])
        own_decodes = self._place_decodes(rows[:all_decodes], has_others=bool(prompts))
        host = {name: slot.prompt_inputs_host[place].view(dtype) for name, (place, dtype) in self.places.items()}
        for name in _SNAPSHOTS:
            host[name] = host[name].reshape(-1, MOST_SNAPSHOTS)
        decoded, stop, count = self.decodes.host.fields, num_tokens, len(prompts)
        for name in ("positions", "slot_mapping", "adapters"):
            host[name][:num_decodes] = decoded[name][own_decodes]
        start = num_decodes
        for row in prompts:
            host["adapters"][start : start + len(row.token_ids)] = row.adapter
            start += len(row.token_ids)
        for name, padding in (("positions", 0), ("slot_mapping", -1), ("adapters", -1)):
            host[name][stop:size] = padding
        given, decode_rows = host["given"][: size * self.ranks], host["decode_rows"][: size * self.ranks]
        given[:], decode_rows[:] = 0, -1
        decode_rows[placed.starts[:all_decodes]] = np.arange(all_decodes)
        for row, start in zip(rows[all_decodes:], placed.starts[all_decodes:].tolist(), strict=True):
            given[start : start + len(row.token_ids)] = row.token_ids
        starts, seq_lens, last = host["query_start_loc"], host["seq_lens"], host["last"]
        if batch is not None:
            host["positions"][num_decodes:stop] = batch.positions_T
            host["slot_mapping"][num_decodes:stop] = batch.slots_T
            starts[:count] = batch.query_start_loc_R[:-1] + num_decodes
            seq_lens[:count] = batch.seq_lens_R
            host["context"][:count] = [row.token_start for row in prompts]
            host["state_slots"][:count] = [row.state_slot for row in prompts]
            host["snapshot_slots"][:count], host["snapshot_lens"][:count] = snapshots_of(prompts)
            width = batch.block_table.shape[1]
            (table_PB,) = to_device((batch.block_table,), self.table.device)
            self.table[:count, :width].copy_(table_PB)
        last[: len(rows)] = placed.starts + [len(row.token_ids) - 1 for row in rows]
        last[len(rows) :] = 0
        # All requests after the prompts have no keys; the last of the step's size has the padding as its queries.
        starts[count:] = stop + placed.is_idle  # a rank without rows has a placeholder
        seq_lens[count:] = host["context"][count:] = 0
        host["state_slots"][count:] = host["snapshot_slots"][count:] = -1
        starts[most_prompts(size) + 1] = size
        self.inputs.copy_(slot.prompt_inputs, non_blocking=True)
        return FilledRows(num_decodes + placed.is_idle, count, placed.starts.tolist())

    def _place_decodes(self, decodes: Sequence[BatchRow], *, has_others: bool) -> Sequence[int]:
        """Tells this rank's decodes from the others, and returns their rows."""
        if self.owned is None:
            return range(len(decodes))
        self.owned.fill(decodes, max(1, len(decodes)), has_others=has_others)
        return [place for place, row in enumerate(decodes) if row.owner == self.owned.parallel.rank]

    def pad_all(self, size: int) -> None:
        """Makes all tokens of the next step padding, so that it writes no KV and no state."""
        self._place_decodes((), has_others=True)
        self.decode_rows.fill_(-1)
        self.slot_mapping.fill_(-1)
        self.state_slots.fill_(-1)
        self.snapshot_slots.fill_(-1)
        self.seq_lens.zero_()
        self.query_start_loc.zero_()
        self.query_start_loc[most_prompts(size) + 1 :].fill_(size)

    def padded(self, size: int) -> PaddedBatch:
        """Metadata of steps of this many tokens, including padding. It has views, so it stays valid."""
        requests, decodes = most_prompts(size) + 1, self.most_decodes(size)
        return PaddedBatch(
            decode_seq_lens=self._of_decodes.seq_lens[:decodes],
            decode_table=self._of_decodes.table[:decodes],
            query_start_loc=self.query_start_loc[: requests + 1],
            seq_lens=self.seq_lens[:requests],
            block_table=self.table[:requests],
            max_query_len=size,
            slot_mapping=self.slot_mapping[:size],
        )

    def state_rows(self, size: int, *, in_order: bool) -> StateRows:
        """The recurrent states of steps of this many tokens, including padding. It has views, so it stays valid."""
        prompts, decodes = most_prompts(size), self.most_decodes(size)
        return StateRows(
            self.decodes.state_slots[:decodes],
            self.decodes.seq_lens[:decodes],
            self.state_slots[:prompts],
            self.query_start_loc[: prompts + 1],
            self.context[:prompts],
            self.snapshot_slots[:prompts],
            self.snapshot_lens[:prompts],
            max_prompt_tokens=size,
            decode_next_N=self.decodes.state_next[:decodes],
            in_order=in_order,
        )

    @property
    def _of_decodes(self) -> DecodeBuffers | OwnedBuffers:
        """Lengths and blocks of this rank's decodes."""
        return self.owned or self.decodes

    def begin(self, size: int) -> None:
        """Completes the decodes' block tables at the start of a step."""
        self.decodes.place_new_blocks()
        if self.owned is not None:
            self.owned.take_own(self.most_decodes(size))

    def look_tokens_up(self, size: int) -> Tensor:
        """The tokens that the step computes, int32, of each rank `size`."""
        decodes = self.all_decodes(size)
        looked_up = self.decodes.look_tokens_up(decodes)
        if self.owned is not None:
            token_ids, rows_A = self.token_ids[: size * self.ranks], self.decode_rows[: size * self.ranks]
            looked_up_A = looked_up.index_select(0, rows_A.clamp(min=0))
            return torch.where(rows_A >= 0, looked_up_A, self.given[: len(token_ids)], out=token_ids)
        token_ids = self.token_ids[:size]
        token_ids[decodes:].copy_(self.given[decodes:size])
        is_decode = self.decodes.seq_lens[:decodes] > 0
        torch.where(is_decode, looked_up, self.given[:decodes], out=token_ids[:decodes])
        return token_ids

    def common(self, num_decodes: int, num_prompts: int, size: int) -> CommonAttentionMetadata:
        """Metadata of the step that is filled in, for builders that need the host's values. On a CPU only, after the
        decodes' new blocks are placed."""
        decodes = self._of_decodes
        starts = torch.cat((torch.arange(num_decodes, dtype=torch.int32), self.query_start_loc[: num_prompts + 1]))
        seq_lens = torch.cat((decodes.seq_lens[:num_decodes], self.seq_lens[:num_prompts]))
        query_lens = starts.diff()
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            num_computed_tokens_cpu=seq_lens - query_lens,
            num_reqs=num_decodes + num_prompts,
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(query_lens.max()),
            block_table_tensor=torch.cat((decodes.table[:num_decodes], self.table[:num_prompts])),
            slot_mapping=self.slot_mapping[:size],
        )


def new_prompt_buffers(
    decodes: DecodeBuffers,
    owned: OwnedBuffers | None,
    *,
    max_tokens: int,
    max_requests: int,
    max_context_tokens: int,
    block_size: int,
    hidden_size: int,
    dtype: torch.dtype,
) -> PromptBuffers:
    """Buffers in which every token is padding.

    Args:
        max_tokens: of each rank.
        max_requests: most rows of a step; at most those of the decodes' buffers.
    """
    device, requests = decodes.inputs.device, most_prompts(max_tokens) + 1
    all_tokens = max_tokens * (1 if owned is None else owned.parallel.size)
    width = -(-max_context_tokens // (block_size * TABLE_MULTIPLE)) * TABLE_MULTIPLE
    fields: tuple[tuple[str, int, type[np.generic]], ...] = (
        ("given", all_tokens, np.int32),
        ("decode_rows", all_tokens, np.int32),
        ("adapters", max_tokens, np.int32),
        ("query_start_loc", requests + 1, np.int32),
        ("seq_lens", requests, np.int32),
        ("context", requests, np.int32),
        ("state_slots", requests, np.int32),
        *((name, requests * MOST_SNAPSHOTS, np.int32) for name in _SNAPSHOTS),
        ("positions", max_tokens, np.int64),
        ("slot_mapping", max_tokens, np.int64),
        ("last", decodes.max_rows, np.int64),
    )
    places: dict[str, tuple[slice, np.dtype[Any]]] = {}
    stop = 0
    for name, count, dtype_on_host in fields:
        start, kind = stop, np.dtype(dtype_on_host)
        stop = start + -(-count * kind.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        places[name] = slice(start, start + count * kind.itemsize), kind
    inputs = torch.zeros(stop, dtype=torch.uint8, device=device)
    on_device = {name: inputs[place].view(_TORCH_DTYPES[kind]) for name, (place, kind) in places.items()}
    on_device["slot_mapping"].fill_(-1)
    on_device["state_slots"].fill_(-1)
    for name in _SNAPSHOTS:
        on_device[name] = on_device[name].view(-1, MOST_SNAPSHOTS)
    on_device["snapshot_slots"].fill_(-1)
    return PromptBuffers(
        decodes=decodes,
        owned=owned,
        inputs=inputs,
        table=torch.zeros(requests, width, dtype=torch.int32, device=device),
        token_ids=torch.zeros(all_tokens, dtype=torch.int32, device=device),
        hidden=torch.zeros(all_tokens, hidden_size, dtype=dtype, device=device),
        places=places,
        block_size=block_size,
        max_requests=max_requests,
        **on_device,
    )


def _check_width(blocks: int, most: int) -> None:
    if blocks > most:
        raise InternalError(
            f"a prompt has {blocks} blocks", field="block_ids", value=blocks, allowed=(f"at most {most}",)
        )
