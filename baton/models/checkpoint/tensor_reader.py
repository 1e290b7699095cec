"""Reads tensors from files into allocated memory, as fast as the disk allows.

Several threads read in the order of the files, large tensors in pieces. Each piece goes straight to its place, or on a
GPU through two pinned buffers per thread: one is filled while the other is copied.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from baton.core.errors import ConfigError
from baton.models.checkpoint.checkpoint import StoredTensor
from baton.models.checkpoint.gguf_tensors import GgufEncoding
from baton.models.formats.gguf_blocks import dequantize

TORCH_DTYPES = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "I64": torch.int64,
        "I32": torch.int32,
        "I8": torch.int8,
        "U8": torch.uint8,
    }
)
# For 0.84 GB, cold, two busy cores spend 0.64 s here; plain reads into memory that was used before take 0.47 s. Tried
# and rejected: huge pages for the targets, 0.75 s; mapping their pages before each read, 0.70 s; O_DIRECT through a
# buffer, 0.56 s, but more time in all; converting in parts that stay in a core's cache, 0.58 s instead of 0.51 s.
_PIECE_BYTES = 16 << 20
_LONG_RUN_BYTES = 64 << 10
_MAX_THREADS = 8


class _Piece(NamedTuple):
    """A run of a file's bytes for `target`, as numbers of `dtype`, without the bytes in gaps (see `StoredTensor`).
    With an `encoding`, they are decoded to `dtype`."""

    file: Path
    start: int
    num_bytes: int
    dtype: torch.dtype
    target: Tensor
    gap_bytes: int = 0
    encoding: GgufEncoding | None = None

    @property
    def plain(self) -> bool:
        """Whether the bytes are the target's numbers, one after another."""
        return not self.gap_bytes and self.encoding is None

    def numbers(self, buffer: Tensor) -> Tensor:
        """Returns the numbers of the `num_bytes` bytes read, in the target's shape."""
        if self.encoding is not None:
            return _decoded(self.encoding, buffer).view(self.target.shape)
        numbers = buffer.view(self.dtype)
        if not self.gap_bytes:
            return numbers.view(self.target.shape)
        runs, in_run = self.target.shape
        return numbers.as_strided((runs, in_run), (in_run + self.gap_bytes // self.dtype.itemsize, 1))


def read_into(
    targets: Iterable[tuple[StoredTensor, Tensor]], progress: Callable[[int, int], None] | None = None
) -> None:
    """Fills each target with its tensor's numbers, in the target's dtype. The targets' shapes must match.

    Args:
        targets: on the host or on one GPU. For a part in several runs, each run must be contiguous in its target too.
        progress: called in this thread after each piece, with the bytes read so far and the total bytes.

    Raises:
        ConfigError: a file cannot be read to the end.
    """
    in_order = sorted(targets, key=lambda pair: (pair[0].file, pair[0].start))
    pieces = deque(piece for stored, target in in_order for piece in _cut(stored, target))
    bytes_total, bytes_read = sum(piece.num_bytes for piece in pieces), 0
    for device in {target.device for _, target in in_order if target.is_cuda}:
        torch.cuda.synchronize(device)  # all uses of the targets' memory end before other streams write there
    finished: SimpleQueue[int | None] = SimpleQueue()
    num_threads = min(_MAX_THREADS, len(pieces))
    with ThreadPoolExecutor(num_threads or 1, thread_name_prefix="weights") as threads:
        running = [threads.submit(_read_all, pieces, finished) for _ in range(num_threads)]
        still_running = num_threads
        try:
            while still_running:
                num_bytes = finished.get()
                if num_bytes is None:
                    still_running -= 1
                    continue
                bytes_read += num_bytes
                if progress is not None:
                    progress(bytes_read, bytes_total)
        finally:
            pieces.clear()  # if this thread is interrupted, the others stop too
    for thread in running:
        thread.result()


def read_tensor(stored: StoredTensor) -> Tensor:
    """Reads one tensor to the host, as it is stored, or in float32 from a GGUF file."""
    dtype = torch.float32 if stored.encoding is not None else TORCH_DTYPES[stored.dtype]
    tensor = torch.empty(stored.shape, dtype=dtype, device="cpu")
    read_into([(stored, tensor)])
    return tensor


def _cut(stored: StoredTensor, target: Tensor) -> Iterator[_Piece]:
    if target.numel() == 0:
        return
    if stored.encoding is not None:
        yield from _cut_encoded(stored, stored.encoding, target)
        return
    if stored.gap_bytes:
        yield from _cut_runs(stored, target)
        return
    # Contiguous memory may be cut anywhere, other memory only between its rows.
    rows = target.view(-1) if target.is_contiguous() else target
    row_bytes = (stored.stop - stored.start) // len(rows)
    rows_per_piece = max(1, _PIECE_BYTES // row_bytes)
    dtype, start = TORCH_DTYPES[stored.dtype], stored.start
    for part in rows.split(rows_per_piece):
        yield _Piece(stored.file, start, row_bytes * len(part), dtype, part)
        start += row_bytes * len(part)


def _cut_encoded(stored: StoredTensor, encoding: GgufEncoding, target: Tensor) -> Iterator[_Piece]:
    """Cuts rows of a GGUF file into pieces of whole heads, whose rows have an order of their own."""
    unit = encoding.head_rows or 1
    rows_per_piece = max(1, _PIECE_BYTES // (4 * encoding.row_numbers * unit)) * unit
    start = stored.start
    for part in target.split(rows_per_piece):
        num_bytes = encoding.row_bytes * len(part)
        yield _Piece(stored.file, start, num_bytes, torch.float32, part, encoding=encoding)
        start += num_bytes


def _decoded(encoding: GgufEncoding, buffer: Tensor) -> Tensor:
    """Returns whole rows of a GGUF file as float32, in the order and with the values of a checkpoint."""
    numbers = dequantize(encoding.type.name, buffer.view(-1, encoding.type.block_bytes)).view(-1, encoding.row_numbers)
    if encoding.head_rows:  # a head's rows i and i + half lie next to each other
        numbers = numbers.unflatten(0, (-1, encoding.head_rows // 2, 2)).transpose(1, 2).flatten(0, 2)
    if encoding.offset:
        numbers = numbers + encoding.offset
    columns = encoding.columns
    return numbers if columns is None else numbers[:, columns.start : columns.stop].contiguous()


def _cut_runs(stored: StoredTensor, target: Tensor) -> Iterator[_Piece]:
    """Cuts a part of a tensor into pieces. Short runs are read together with the gaps between them, because the ranks
    of a host share its page cache: one of two ranks read 0.64 GB this way in 1.1 s from a cold disk, and 0.48 GB with
    one call for each run in 3.7 s."""
    runs = target.view(-1, stored.run_bytes // TORCH_DTYPES[stored.dtype].itemsize)
    row_bytes, start = stored.run_bytes + stored.gap_bytes, stored.start
    if stored.run_bytes >= _LONG_RUN_BYTES:
        for run in runs:
            stop = start + stored.run_bytes
            yield from _cut(replace(stored, start=start, stop=stop, run_bytes=0, gap_bytes=0), run)
            start += row_bytes
        return
    for part in runs.split(max(1, _PIECE_BYTES // row_bytes)):
        num_bytes = row_bytes * len(part) - stored.gap_bytes
        yield _Piece(stored.file, start, num_bytes, TORCH_DTYPES[stored.dtype], part, stored.gap_bytes)
        start += row_bytes * len(part)


def _read_all(pieces: deque[_Piece], finished: "SimpleQueue[int | None]") -> None:
    """Runs in each thread: reads pieces until there are none, then puts None."""
    try:
        with closing(_Reader()) as reader:
            while pieces:
                try:
                    piece = pieces.popleft()
                except IndexError:  # another thread was faster
                    break
                reader.read(piece)
                finished.put(piece.num_bytes)
    except BaseException:
        pieces.clear()
        raise
    finally:
        finished.put(None)


class _Reader:
    """One thread's open file and buffers."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._descriptor = -1
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._ring: _PinnedRing | None = None

    def read(self, piece: _Piece) -> None:
        target = piece.target
        if target.is_cuda:
            self._ring = self._ring or _PinnedRing(target.device)
            buffer = self._ring.buffer(target.numel() * piece.dtype.itemsize)
            if not piece.plain:
                numbers = buffer.view(piece.dtype).view(target.shape)
                numbers.copy_(piece.numbers(self._filled(piece)))
            else:
                self._fill(buffer, piece)
            self._ring.send(buffer.view(piece.dtype), target)
        elif target.dtype == piece.dtype and target.is_contiguous() and piece.plain:
            self._fill(target.view(-1).view(torch.uint8), piece)
        else:
            target.copy_(piece.numbers(self._filled(piece)))

    def _filled(self, piece: _Piece) -> Tensor:
        if len(self._buffer) < piece.num_bytes:
            self._buffer = torch.empty(piece.num_bytes, dtype=torch.uint8, device="cpu")
        buffer = self._buffer[: piece.num_bytes]
        self._fill(buffer, piece)
        return buffer

    def close(self) -> None:
        """Waits for pending copies to the GPU."""
        if self._ring is not None:
            self._ring.close()
        if self._file is not None:
            os.close(self._descriptor)

    def _fill(self, buffer: Tensor, piece: _Piece) -> None:
        memory, start = buffer.numpy().data, piece.start
        try:
            self._open(piece.file)
            while memory:
                num_bytes = os.preadv(self._descriptor, [memory], start)
                if num_bytes == 0:
                    raise _unreadable(piece.file, f"it ends before byte {start}")
                memory, start = memory[num_bytes:], start + num_bytes
        except OSError as error:
            raise _unreadable(piece.file, error.strerror or str(error)) from error

    def _open(self, file: Path) -> None:
        if file == self._file:
            return
        if self._file is not None:
            self._file = None
            os.close(self._descriptor)
        self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self._file = file


@dataclass
class _Slot:
    """Pinned memory with the event after the last copy from it."""

    memory: Tensor
    copied: torch.cuda.Event


class _PinnedRing:
    """Two pinned buffers and a stream that copies them to a GPU while the host continues."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # NOTE: an event belongs to the device that is current at its first record, so each ring has its own events.
        self._slots = deque(_Slot(_pinned(_PIECE_BYTES), torch.cuda.Event(blocking=True)) for _ in range(2))

    def buffer(self, num_bytes: int) -> Tensor:
        """Waits for the older copy to end, and returns its buffer."""
        self._slots.rotate()
        slot = self._slots[0]
        slot.copied.synchronize()
        if len(slot.memory) < num_bytes:
            slot.memory = _pinned(num_bytes)
        return slot.memory[:num_bytes]

    def send(self, numbers: Tensor, target: Tensor) -> None:
        """Copies the last buffer's numbers to `target`."""
        numbers = numbers.view(target.shape)
        with torch.cuda.stream(self._stream):
            if numbers.dtype != target.dtype:
                numbers = numbers.to(self._device, non_blocking=True)  # on the host, converting would wait
            target.copy_(numbers, non_blocking=True)
            self._slots[0].copied.record(self._stream)

    def close(self) -> None:
        self._stream.synchronize()


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _unreadable(file: Path, why: str) -> ConfigError:
    return ConfigError(
        f"cannot read {file}: {why}", field="model", value=str(file), cure="download the checkpoint again"
    )
