"""Rows of a decode step that share their first blocks, in tensors that a captured step reads.

The host only provides which rows share how many keys. The step itself then splits each row's block table after these
keys, so that cascade attention (`attention.cascade`) reads the shared ones once. Legend: N maximum rows, R rows of a
step, B blocks of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from attention.host_to_device import to_device
from attention.kernels.paged.split import LEAST_KEYS, SplitLayer, choose_splits
from attention.kernels.prefix_tables import split_tables
from attention.metadata import CommonAttentionMetadata

# Triton compiles a kernel again for a pointer that is not a multiple of 16 bytes, so each input begins at one.
_ALIGNED = 4

# Times of one layer on an H200, in units of the 14 ns in which a multiprocessor reads a key of one kv head of 128
# channels in 16 bits: a key of a row that reads alone, a key of a tile of 128 query rows, a query head's results, and
# the further launches. They are fitted to 60 batches of 8 to 256 rows with 256 to 32,768 shared keys. The last one has
# a margin of 8 us, with which no batch that was chosen took longer.
_ALONE_COST, _TILE_COST, _HEAD_COST, _LAUNCH_COST = 0.84, 0.54, 0.05, 2050.0
_TILE_ROWS = 128
# How long it takes to read a key in 8 bits, as a share of one in 16 bits.
_BYTE_KEY_COST = 0.8


class GroupSavings(Protocol):
    """Estimates what a group saves in each layer. Its `repr` shows all that the estimate depends on."""

    def saved(self, *, num_rows: int, span: int, num_keys: int) -> float:
        """The time saved by reading `num_keys` keys once for `num_rows` rows; below 0 it is a loss.

        Args:
            span: rows from the first one of the group to its last one.
        """
        ...


class GroupCosts(NamedTuple):
    """Estimates what a group saves in each layer of GQA.

    Args:
        layer: the layer's sizes.
        key_cost: the time to read a key of one kv head, as a share of that of a key of 128 channels in 16 bits.
    """

    layer: SplitLayer
    key_cost: float

    @classmethod
    def of(cls, layer: SplitLayer, itemsize: int) -> "GroupCosts":
        """The costs of a layer whose keys have channels of so many bytes."""
        return cls(layer, layer.value_size / 128 * (_BYTE_KEY_COST if itemsize == 1 else itemsize / 2))

    def saved(self, *, num_rows: int, span: int, num_keys: int) -> float:
        """As in `GroupSavings`, in units of 14 ns. Rows between the first and the last one are computed too."""
        layer = self.layer
        alone = _ALONE_COST * self.key_cost * layer.num_kv_heads * num_rows * num_keys / layer.num_sms
        tiles = -(-span * layer.num_heads // (layer.num_kv_heads * _TILE_ROWS))
        splits = choose_splits(layer, num_tokens=span, num_reqs=1, batch_tokens=span, num_keys=num_keys)
        waves = -(-layer.num_kv_heads * tiles * splits // layer.num_sms)
        keys = max(min(num_keys, LEAST_KEYS), num_keys / splits)
        together = waves * keys * _TILE_COST * max(1.0, layer.value_size / 128)
        return alone - together - span * layer.num_heads * _HEAD_COST - _LAUNCH_COST


@dataclass(frozen=True)
class PrefixGroup:
    """The group of a step, in memory that never moves.

    Attributes:
        inputs: int32, what the host writes: the next three one after another.
        rows: [2] int32, the first row of the group and the end of its last one.
        num_keys: [1] int32, the keys that the group shares, in whole blocks; 0: there is no group.
        lens_N: [N] int32, `num_keys` for rows of the group and 0 for others.
        own_lens_N: [N] int32, each row's other keys; written by the step.
        tables: [N + 1, B] int32, the blocks of the shared keys, then each row's other blocks; written by the step.
    """

    inputs: Tensor
    rows: Tensor
    num_keys: Tensor
    lens_N: Tensor
    own_lens_N: Tensor
    tables: Tensor

    def fill(self, places: Sequence[int], num_keys: int) -> None:
        """Writes which rows share how many keys; the places are in order. Queues a copy; the host does not wait."""
        inputs = np.zeros(len(self.inputs), np.int32)
        if len(places):
            inputs[0], inputs[1], inputs[_ALIGNED] = places[0], places[-1] + 1, num_keys
            inputs[2 * _ALIGNED :][np.asarray(places)] = num_keys
        (copied,) = to_device((inputs,), self.inputs.device)
        self.inputs.copy_(copied)

    def split(self, common: CommonAttentionMetadata, block_size: int) -> None:
        """Splits the rows' lengths and tables after the shared keys, at the start of a step."""
        num_rows, table = common.num_reqs, common.block_table_tensor
        split_tables(
            self.rows,
            self.num_keys,
            self.lens_N[:num_rows],
            seq_lens_R=common.seq_lens,
            table_RB=table,
            block_size=block_size,
            own_lens_R=self.own_lens_N[:num_rows],
            tables=self.tables[: num_rows + 1],
        )


def new_prefix_group(max_rows: int, width: int, device: torch.device) -> PrefixGroup:
    """Buffers without a group.

    Args:
        width: of the step's block table.
    """
    inputs = torch.zeros(2 * _ALIGNED + max_rows, dtype=torch.int32, device=device)
    return PrefixGroup(
        inputs,
        rows=inputs[:2],
        num_keys=inputs[_ALIGNED : _ALIGNED + 1],
        lens_N=inputs[2 * _ALIGNED :],
        own_lens_N=torch.zeros(max_rows, dtype=torch.int32, device=device),
        tables=torch.zeros(max_rows + 1, width, dtype=torch.int32, device=device),
    )
