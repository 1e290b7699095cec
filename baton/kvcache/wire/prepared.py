"""Prepares kernels for gather, scatter and digest on a GPU, for callers that move one segment after another.

Everything that all segments have in common is computed once, so a segment costs the host little more than one launch.
After a stream's first use nothing is allocated, and the host never waits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baton.kvcache.cache import PagedKVCache
from baton.kvcache.wire.digest import COLUMNS, ROW_BYTES, constant_term, digest_on_device
from baton.kvcache.wire.gather_scatter import gather_to_wire, scatter_from_wire
from baton.kvcache.wire.kernels.digest import new_scratch, prepare_digest, programs_at_once, programs_for
from baton.kvcache.wire.kernels.gather_scatter import cut_to_move, prepare_gather_and_digest, prepare_move
from baton.kvcache.wire.places import places_of
from baton.tritonlib.launch import PreparedKernel, current_stream


class DeviceWire:
    """One cache's prepared kernels. One thread makes and uses it; that thread's current device is the cache's.

    A segment uses the beginning of memory and block ids. Both may be longer, so that callers keep the same tensors for
    all segments. Otherwise arguments and errors are those of `baton.kvcache.wire.gather_scatter`, except that block ids
    are not checked: blocks outside the cache are neither read nor written, and a payload has zeros in their place.

    Methods launch on `stream`; None is the thread's current one.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self._memory = cache.memory
        self._device = cache.storage.device
        self._programs = programs_at_once(self._device)
        self._digest = prepare_digest(COLUMNS, self._device)
        self._moves: dict[range, _Moves] = {}
        self._scratch: dict[int, Tensor] = {}
        self._moves_of(range(cache.spec.num_kv_heads))

    def gather(
        self,
        *,
        block_ids: Tensor,
        token_start: int,
        token_stop: int,
        layers: range,
        heads: range,
        out: Tensor,
        digest_out: Tensor | None = None,
        digest_add: int = 0,
        stream: torch.cuda.Stream | None = None,
    ) -> int:
        """Gathers like `gather_to_wire`; returns the payload's size in bytes.

        Args:
            digest_out: 8 contiguous bytes, wherever they start, in memory of the GPU or in page-locked memory of the
                CPU.
        """
        num_tokens = token_stop - token_start
        moves = self._usual_moves(block_ids, token_start, num_tokens, layers, heads, out)
        if moves is None or (digest_out is not None and moves.gather_and_digest is None):
            num_bytes = _payload_bytes(self._cache, num_tokens, layers, heads)
            with torch.cuda.stream(stream):
                gather_to_wire(
                    self._cache,
                    block_ids=block_ids,
                    token_start=token_start,
                    token_stop=token_stop,
                    layers=layers,
                    heads=heads,
                    out=out[:num_bytes],
                    digest_out=digest_out,
                    digest_add=digest_add,
                )
            return num_bytes
        handle = current_stream(self._device) if stream is None else stream.cuda_stream
        num_bytes = num_tokens * len(layers) * moves.token_layer_bytes
        numbers = moves.numbers(token_start, num_tokens, layers)
        if digest_out is None or moves.gather_and_digest is None:
            moves.gather.launch(moves.num_tiles(numbers), handle, self._memory, out, block_ids, *numbers)
            return num_bytes
        moves.gather_and_digest.launch(
            programs_for(-(-num_bytes // ROW_BYTES), self._programs),
            handle,
            self._memory,
            out,
            block_ids,
            self._scratch_of(handle, stream),
            digest_out,
            constant_term(num_bytes, digest_add),
            *numbers,
        )
        return num_bytes

    def gathers(
        self,
        *,
        block_ids: Tensor,
        num_tokens: int,
        layers: range,
        heads: range,
        out: Tensor,
        stream: torch.cuda.Stream | None = None,
    ) -> Callable[[int, Tensor], None]:
        """Prepares gathers of equally many tokens with a digest. The result launches one: its arguments are the first
        token and `digest_out` of `gather`."""
        moves = self._usual_moves(block_ids, 0, num_tokens, layers, heads, out)
        if moves is None or moves.gather_and_digest is None:
            arguments = {"block_ids": block_ids, "layers": layers, "heads": heads, "out": out, "stream": stream}
            return partial(self._gather_at, num_tokens, arguments)
        handle = current_stream(self._device) if stream is None else stream.cuda_stream
        num_bytes = num_tokens * len(layers) * moves.token_layer_bytes
        num_rows, token_rows, _, *rest = moves.numbers(0, num_tokens, layers)
        launch = partial(
            moves.gather_and_digest.launch,
            programs_for(-(-num_bytes // ROW_BYTES), self._programs),
            handle,
            self._memory,
            out,
            block_ids,
            self._scratch_of(handle, stream),
        )
        constant = constant_term(num_bytes, 0)
        last_start = block_ids.numel() * self._cache.shape.block_size - num_tokens

        def gather(token_start: int, digest_out: Tensor) -> None:
            assert 0 <= token_start <= last_start, "the caller checks the tokens"
            launch(digest_out, constant, num_rows, token_rows, token_start, *rest)

        return gather

    def _gather_at(self, num_tokens: int, arguments: dict[str, Any], token_start: int, digest_out: Tensor) -> None:
        self.gather(token_start=token_start, token_stop=token_start + num_tokens, digest_out=digest_out, **arguments)

    def scatter(
        self,
        *,
        block_ids: Tensor,
        token_start: int,
        token_stop: int,
        layers: range,
        heads: range,
        payload: Tensor,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Scatters like `scatter_from_wire`."""
        num_tokens = token_stop - token_start
        moves = self._usual_moves(block_ids, token_start, num_tokens, layers, heads, payload)
        if moves is not None:
            handle = current_stream(self._device) if stream is None else stream.cuda_stream
            numbers = moves.numbers(token_start, num_tokens, layers)
            moves.scatter.launch(moves.num_tiles(numbers), handle, self._memory, payload, block_ids, *numbers)
            return
        with torch.cuda.stream(stream):
            scatter_from_wire(
                self._cache,
                block_ids=block_ids,
                token_start=token_start,
                token_stop=token_stop,
                layers=layers,
                heads=heads,
                payload=payload[: _payload_bytes(self._cache, num_tokens, layers, heads)],
            )

    def digest(
        self,
        payload: Tensor,
        num_bytes: int,
        *,
        out: Tensor,
        digest_add: int = 0,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Digests the first bytes of any memory of the device, like `digest_on_device`; `out` is like `digest_out` of
        `gather`."""
        if num_bytes > payload.numel() or (payload.data_ptr() | num_bytes) % PreparedKernel.ALIGN_BYTES:
            with torch.cuda.stream(stream):
                digest_on_device(payload[:num_bytes], out=out, add=digest_add)
            return
        handle = current_stream(self._device) if stream is None else stream.cuda_stream
        self._digest.launch(
            programs_for(-(-num_bytes // ROW_BYTES), self._programs),
            handle,
            payload,
            self._scratch_of(handle, stream),
            out,
            num_bytes,
            constant_term(num_bytes, digest_add),
        )

    def _usual_moves(
        self, block_ids: Tensor, token_start: int, num_tokens: int, layers: range, heads: range, payload: Tensor
    ) -> "_Moves | None":
        """The prepared kernels for a segment. Returns None if an argument is wrong, or the payload's address does
        not suit them."""
        spec = self._cache.spec
        if (
            0 <= token_start < token_start + num_tokens <= block_ids.numel() * self._cache.shape.block_size
            and 0 <= layers.start < layers.stop
            and layers[-1] < spec.num_layers
            and 0 <= heads.start < heads.stop <= spec.num_kv_heads
            and heads.step == 1
            and payload.data_ptr() % PreparedKernel.ALIGN_BYTES == 0
        ):
            moves = self._moves_of(heads)
            if num_tokens * len(layers) * moves.token_layer_bytes <= payload.numel():
                return moves
        return None

    def _moves_of(self, heads: range) -> "_Moves":
        moves = self._moves.get(heads)
        if moves is None:
            moves = self._moves[heads] = _prepare_moves(self._cache, heads)
        return moves

    def _scratch_of(self, handle: int, stream: torch.cuda.Stream | None) -> Tensor:
        """The stream's own scratch memory, because digests on different streams may overlap."""
        scratch = self._scratch.get(handle)
        if scratch is None:
            with torch.cuda.stream(stream):
                scratch = self._scratch[handle] = new_scratch(COLUMNS, self._device)
        return scratch


@dataclass(frozen=True, eq=False)
class _Moves:
    """The prepared kernels for some of a cache's heads.

    Attributes:
        gather_and_digest: None if payloads must be digested afterwards.
        token_layer_bytes: bytes of one token in one layer.
        token_rows: rows of one token in one layer's keys.
        tile_rows: rows of a tile of `gather` and `scatter`.
        places: the kernels' arguments after the rows and the first token: the number of blocks, the first byte, and the
            strides from one layer, key or value, block, token and head to the next.
    """

    gather: PreparedKernel
    scatter: PreparedKernel
    gather_and_digest: PreparedKernel | None
    token_layer_bytes: int
    token_rows: int
    kv_factor: int
    tile_rows: int
    places: tuple[int, ...]

    def numbers(self, token_start: int, num_tokens: int, layers: range) -> tuple[int, ...]:
        """A payload's arguments for the kernels."""
        num_blocks, first, stride_L, *strides = self.places
        rows = num_tokens * self.token_rows
        return (
            rows * self.kv_factor * len(layers),
            rows,
            token_start,
            num_blocks,
            first + layers.start * stride_L,
            layers.step * stride_L,
            *strides,
        )

    def num_tiles(self, numbers: tuple[int, ...]) -> int:
        return -(-numbers[0] // self.tile_rows)


def _prepare_moves(cache: PagedKVCache, heads: range) -> _Moves:
    device = cache.storage.device
    places = places_of(cache, 0, 1, range(1), heads)
    cut = cut_to_move(places)
    _, token_rows, _, *numbers = cut.arguments
    can_digest = places.can_be_digested(cache.storage)
    return _Moves(
        gather=prepare_move(places, device, to_cache=False),
        scatter=prepare_move(places, device, to_cache=True),
        gather_and_digest=prepare_gather_and_digest(places, device, columns=COLUMNS) if can_digest else None,
        token_layer_bytes=_payload_bytes(cache, 1, range(1), heads),
        token_rows=token_rows,
        kv_factor=cache.spec.kv_factor,
        tile_rows=cut.constants["ROWS"],
        places=tuple(numbers),
    )


def _payload_bytes(cache: PagedKVCache, num_tokens: int, layers: range, heads: range) -> int:
    spec = cache.spec
    return num_tokens * len(layers) * spec.kv_factor * len(heads) * spec.head_dim * spec.itemsize
