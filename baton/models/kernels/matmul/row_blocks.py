"""Batch-invariant products on a CPU, whose library chooses its method by the number of rows.

So rows go to it in blocks of a fixed number. Where it computes the rows of a block in different ways, which a probe of
each shape finds, they go to it one by one.

Legend: M rows, N columns, K the summed axis, H heads.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

# Rows in each call of a CPU's library. One row takes 3 to 5 times as long as in a call of its own, 256 rows 2 to 3
# times.
_CPU_ROWS = 16
# Number of results compared at least for each shape of weights, or as many as there are columns.
_PROBED_NUMBERS = 256
# Weights up to this size are drawn for the probe: an adapter's may be zero, which would hide a difference.
_DRAWN_NUMBERS = 1 << 22
_ALIGNMENT = 64  # bytes; of torch's memory on a CPU, and of its widest vectors


class _Alike(NamedTuple):
    """The facts besides the number of rows by which a CPU's library can choose its method."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    address: int
    num_threads: int


@dataclass
class _Probe:
    """The number of rows in each call of a CPU's library with such weights; 0: unknown yet."""

    weights: _Alike
    at_once: int = 0


def multiply_in_blocks(x_HMK: Tensor, weight_HKN: Tensor, out_HMN: Tensor) -> None:
    """Writes each head's `x @ weight` to `out`; a row's result does not depend on other rows."""
    num_rows = x_HMK.shape[1]
    at_once = _rows_at_once(weight_HKN)
    for start in range(0, num_rows, at_once):
        stop = min(start + at_once, num_rows)
        # A new block each time: the library's method may depend on an address.
        block_HMK = x_HMK.new_zeros(x_HMK.shape[0], at_once, x_HMK.shape[2])
        block_HMK[:, : stop - start] = x_HMK[:, start:stop]
        out_HMN[:, start:stop] = torch.bmm(block_HMK, weight_HKN)[:, : stop - start]


def _rows_at_once(weight_HKN: Tensor) -> int:
    """Returns how many rows a CPU's library gets in one call with this weight: a block if it computes all its rows
    alike, else one."""
    shape, strides, address = tuple(weight_HKN.shape), weight_HKN.stride(), weight_HKN.data_ptr() % _ALIGNMENT
    probe = _probe_of(_Alike(shape, strides, weight_HKN.dtype, address, torch.get_num_threads()))
    if probe.at_once == 0:
        drawn = weight_HKN.numel() <= _DRAWN_NUMBERS
        weight = torch.empty_strided(shape, strides, dtype=weight_HKN.dtype).normal_() if drawn else weight_HKN
        probe.at_once = _CPU_ROWS if _computes_rows_alike(weight) else 1
    return probe.at_once


def _computes_rows_alike(weight_HKN: Tensor) -> bool:
    """Whether equal rows have results with equal bits anywhere in a block."""
    heads, channels, columns = weight_HKN.shape
    for _ in range(max(1, _PROBED_NUMBERS // (heads * columns))):
        row_H1K = torch.empty(heads, 1, channels, dtype=weight_HKN.dtype).normal_()
        product_HMN = torch.bmm(row_H1K.expand(-1, _CPU_ROWS, -1).contiguous(), weight_HKN)
        if not torch.equal(product_HMN, product_HMN[:, :1].expand_as(product_HMN)):
            return False
    return True


@lru_cache(maxsize=4096)
def _probe_of(alike: _Alike) -> _Probe:
    return _Probe(alike)
