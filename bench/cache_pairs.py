"""Pairs of KV caches in two processes, the one sending to the other: what benchmarks of transfers time.

All pairs that are to be compared are open at once and transfer in turns, so that whatever else the machine does falls
on all alike. Uses what a node uses, in the way it does; knows no figure's meaning.
"""

import asyncio
import multiprocessing
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection

import torch

from kvcache.cache import PagedKVCache
from kvcache.layout import KVCacheLayout
from kvcache.spec import KVCacheShape, KVCacheSpec
from kvtransfer.flows import Flow, RankPair, flows, heads_of
from kvtransfer.leases import LeaseGrant, LeaseTotals
from kvtransfer.rank_transfer import OnFilled, OnRefused
from kvtransfer.ranked import RankedTransfer
from kvtransfer.records import LinkMeasure, SendJob
from kvtransfer.segments import TRAILER_BYTES
from kvtransfer.settings import TransferSettings
from kvtransfer.transfer import KVTransfer

_SENDER = _PEER = _INCARNATION = 1
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class End:
    """One side of a pair: a cache for each rank, with its share of the heads. All are in one process."""

    layout: KVCacheLayout
    block_size: int
    ranks: int = 1
    device: str = "cpu"

    def __str__(self) -> str:
        split = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        return f"{self.layout.name}/{self.block_size}{split}"


@dataclass(frozen=True)
class Case:
    """One pair.

    Attributes:
        tokens: what the caches hold; their blocks are used in random order.
        segment_bytes: of the largest segment, within which each job's is chosen as a node does it.
        fixed_segments: all segments are the largest.
    """

    spec: KVCacheSpec
    source: End
    target: End
    tokens: int
    segment_bytes: int
    staging_slots: int = 4
    digests: bool = True
    fixed_segments: bool = False
    receive_bytes_per_s: float | None = None

    @property
    def flows(self) -> Mapping[RankPair, Flow]:
        return flows(
            num_layers=self.spec.num_layers,
            num_kv_heads=self.spec.num_kv_heads,
            senders=self.source.ranks,
            receivers=self.target.ranks,
        )


@dataclass(frozen=True)
class Place:
    """Where KV is received: caches, one for each rank, and which of their blocks may be written."""

    caches: tuple[PagedKVCache, ...]
    block_ids: tuple[int, ...]


class _SendingProcess:
    """The other process, as this one sees it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._started: dict[tuple[int, int], asyncio.Future[float]] = {}

    def order(self, pair: int, lease: int, tokens: int) -> "asyncio.Future[float]":
        """Has so many tokens sent; the future gets when that began, once it is over there."""
        started = self._started[pair, lease] = asyncio.get_running_loop().create_future()
        self._connection.send((pair, lease, tokens))
        return started

    async def listen(self) -> None:
        """Until the process has ended."""
        try:
            while True:
                pair, lease, start_s = await asyncio.to_thread(self._connection.recv)
                self._started.pop((pair, lease)).set_result(start_s)
        except (EOFError, ConnectionResetError):
            for started in self._started.values():
                if not started.done():
                    started.set_exception(RuntimeError("the sending process has ended; see its message above"))


class Pair:
    """One pair of caches, from this, the receiving process.

    Attributes:
        measure: what the pair was measured to do when it was made, as nodes do it.
    """

    def __init__(self, case: Case, number: int, place: Place, sending: _SendingProcess) -> None:
        self.case = case
        self.place = place
        self.measure = LinkMeasure("", 0.0)
        self._number = number
        self._sending = sending
        self._leases = count()
        self._filled: dict[int, asyncio.Future[float]] = {}
        self.transfer = _transfer(case, case.target, place.caches, self._on_filled)

    async def seconds(self, tokens: int, *, part: int = 0) -> float:
        """Sends the KV of so many tokens: from the call of `send` over there until it is all in the blocks here.

        Args:
            part: which of the place's blocks, so many tokens at a time; parts that are on their way together differ.

        Raises:
            RuntimeError: not all of it came.
            TimeoutError: it did not come in time.
        """
        needed = -(-tokens // self.case.target.block_size)
        lease = next(self._leases)
        filled = self._filled[lease] = asyncio.get_running_loop().create_future()
        await self.transfer.open_lease(
            LeaseGrant(lease, self.place.block_ids[part * needed : (part + 1) * needed], 0, tokens)
        )
        async with asyncio.timeout(_TIMEOUT_S):
            start_s, end_s = await asyncio.gather(self._sending.order(self._number, lease, tokens), filled)
        totals = await self.transfer.close_lease(lease)
        if totals.bytes != tokens * self.case.spec.bytes_per_token:
            raise RuntimeError(f"{totals.bytes} bytes came of {tokens} tokens")
        return float(end_s - start_s)

    async def open_idle_lease(self, tokens: int) -> None:
        """A lease that nothing is sent for."""
        await self.transfer.open_lease(LeaseGrant(next(self._leases), self.place.block_ids, 0, tokens))

    @property
    def bytes_received(self) -> int:
        return sum(traffic.bytes_total for traffic in self.transfer.counters().peers.values())

    def _on_filled(self, filled: LeaseTotals) -> None:
        # Both processes read the same clock.
        self._filled.pop(filled.number).set_result(time.monotonic())


@asynccontextmanager
async def open_pairs(cases: Sequence[Case], places: Sequence[Place] | None = None) -> AsyncIterator[list[Pair]]:
    """Pairs that are connected and warm, all of them with the same second process.

    Args:
        places: where each receives; new caches if not given.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, tuple(cases)), daemon=True)
    process.start()
    theirs.close()  # or nobody would hear of the process's end
    sending = _SendingProcess(ours)
    try:
        async with AsyncExitStack() as stack:
            places = places or [_new_place(case, case.target, seed=2) for case in cases]
            pairs = [Pair(*each, sending) for each in zip(cases, range(len(cases)), places, strict=True)]
            for pair in pairs:
                await stack.enter_async_context(pair.transfer)
                await _connect(pair, ours)
            listening = asyncio.create_task(sending.listen())
            try:
                yield pairs
                ours.send(None)
                await asyncio.to_thread(process.join, 10.0)
            finally:
                process.kill()
                await listening
    finally:
        process.kill()
        await asyncio.to_thread(process.join)


async def in_turns(pairs: Sequence[Pair], tokens: int, rounds: int) -> list[list[float]]:
    """Seconds of every pair's transfers, round by round."""
    seconds: list[list[float]] = [[] for _ in pairs]
    for _ in range(rounds):
        for pair, own in zip(pairs, seconds, strict=True):
            own.append(await pair.seconds(tokens))
    return seconds


async def _connect(pair: Pair, connection: Connection) -> None:
    """Makes and warms up one pair, as two nodes do."""
    transfer = pair.transfer
    connection.send(await transfer.listen(_SENDER, pair.case.flows, sends=False))
    await transfer.connect(_SENDER, await asyncio.to_thread(connection.recv))
    connection.send("connected")
    warm = await asyncio.to_thread(connection.recv)
    pair.measure = await transfer.warmed_up(_SENDER, warm, timeout_s=_TIMEOUT_S)
    connection.send(pair.measure.speed)


def _new_place(case: Case, end: End, *, seed: int) -> Place:
    """Its memory is written to, so that no page of it is new to the first transfer."""
    num_blocks = -(-case.tokens // end.block_size)
    shape = KVCacheShape(end.layout, end.block_size, num_blocks)
    caches = []
    for rank in range(end.ranks):
        heads = heads_of(rank, ranks=end.ranks, num_kv_heads=case.spec.num_kv_heads)
        caches.append(PagedKVCache(replace(case.spec, num_kv_heads=len(heads)), shape, end.device))
        caches[-1].memory.fill_(seed)
    if caches[0].storage.is_cuda:
        torch.cuda.synchronize(end.device)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    return Place(tuple(caches), tuple(order.tolist()))


def _transfer(case: Case, end: End, caches: Sequence[PagedKVCache], on_filled: OnFilled) -> RankedTransfer:
    def made(rank: int, on_filled: OnFilled, on_refused: OnRefused) -> KVTransfer:
        settings = TransferSettings(
            incarnation=_INCARNATION,
            transport="ucx",
            segment_bytes=case.segment_bytes,
            staging_slots=case.staging_slots,
            digests=case.digests,
            receive_bytes_per_s=case.receive_bytes_per_s,
            heads=heads_of(rank, ranks=end.ranks, num_kv_heads=case.spec.num_kv_heads),
        )
        return KVTransfer(caches[rank], settings, on_filled=on_filled, on_refused=on_refused)

    makers = [partial(made, rank) for rank in range(end.ranks)]
    message_bytes = case.segment_bytes + TRAILER_BYTES
    transfer = RankedTransfer(makers, message_bytes=message_bytes)
    transfer.deliver_to(on_filled, _fail)
    return transfer


def _fail(refused: object) -> None:
    raise RuntimeError(f"a benchmark's segment was refused: {refused}")


# ---- in the sending process


def _serve(connection: Connection, cases: Sequence[Case]) -> None:
    torch.set_num_threads(1)
    if cases[0].source.device != "cpu":
        torch.cuda.set_device(cases[0].source.device)
    asyncio.run(_send_as_ordered(connection, cases))


async def _send_as_ordered(connection: Connection, cases: Sequence[Case]) -> None:
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as orders:
        sources = [_new_place(case, case.source, seed=1) for case in cases]
        transfers = []
        for case, source in zip(cases, sources, strict=True):
            transfer = _transfer(case, case.source, source.caches, _fail)
            transfers.append(await stack.enter_async_context(transfer))
            await _be_connected(transfer, case, connection)

        async def obey(pair: int, lease: int, tokens: int) -> None:
            needed = -(-tokens // cases[pair].source.block_size)
            blocks = sources[pair].block_ids[:needed]
            start_s = time.monotonic()
            await transfers[pair].send(
                SendJob(_PEER, _SENDER, lease, _INCARNATION, 0, 0, tokens, tokens, block_ids=blocks)
            )
            connection.send((pair, lease, start_s))

        while (order := await asyncio.to_thread(connection.recv)) is not None:
            orders.create_task(obey(*order))


async def _be_connected(transfer: RankedTransfer, case: Case, connection: Connection) -> None:
    addresses = await asyncio.to_thread(connection.recv)
    connection.send(await transfer.listen(_PEER, case.flows, sends=True))
    await transfer.connect(_PEER, addresses)
    await asyncio.to_thread(connection.recv)  # the receiver has connected too
    connection.send(await transfer.warm_up(_PEER, _SENDER))
    speed = await asyncio.to_thread(connection.recv)
    if not case.fixed_segments:
        await transfer.use_link(_PEER, speed)
