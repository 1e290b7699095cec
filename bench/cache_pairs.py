"""Pairs of KV caches in two processes, one sending to the other, for benchmarks of transfers.

All pairs under comparison are open at once and transfer in turns, so other load on the machine affects all alike. They
use the transfer code as a node does.
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

from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec
from kvtransfer.flows import Flow, RankPair, heads_of, part_flows
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
    """One side of a pair: a cache for each rank, with the rank's heads. All ranks are in one process."""

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
        tokens: capacity of the caches; their blocks are used in random order.
        segment_bytes: size of the largest segment; each job's segment size is chosen below it, as a node does.
        fixed_segments: all segments have the largest size.
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
    def flows(self) -> Mapping[RankPair, tuple[Flow, ...]]:
        return part_flows(self.spec, senders=self.source.ranks, receivers=self.target.ranks)


@dataclass(frozen=True)
class Place:
    """Where KV is received: one cache for each rank, and the blocks that may be written."""

    caches: tuple[PagedKVCache, ...]
    block_ids: tuple[int, ...]


class _SendingProcess:
    """Controls the sending process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._started: dict[tuple[int, int], asyncio.Future[float]] = {}

    def order(self, pair: int, lease: int, tokens: int) -> "asyncio.Future[float]":
        """Orders the transfer of this many tokens. The future gets its start time once the sender has finished."""
        started = self._started[pair, lease] = asyncio.get_running_loop().create_future()
        self._connection.send((pair, lease, tokens))
        return started

    async def listen(self) -> None:
        """Receives the start times until the process ends."""
        try:
            while True:
                pair, lease, start_s = await asyncio.to_thread(self._connection.recv)
                self._started.pop((pair, lease)).set_result(start_s)
        except (EOFError, ConnectionResetError):
            for started in self._started.values():
                if not started.done():
                    started.set_exception(RuntimeError("the sending process has ended; see its error above"))


class Pair:
    """One pair of caches, seen from this process, which receives.

    Attributes:
        measure: the link's measurement when the pair was made, as nodes make it.
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
        """Transfers the KV of this many tokens. Returns the time from the sender's call of `send` until all KV is in
        the blocks here.

        Args:
            part: which of the place's blocks to use, `tokens` at a time; concurrent transfers use different parts.

        Raises:
            RuntimeError: some bytes did not arrive.
            TimeoutError: they did not arrive in time.
        """
        needed = -(-tokens // self.case.target.block_size)
        lease = next(self._leases)
        filled = self._filled[lease] = asyncio.get_running_loop().create_future()
        await self.transfer.leases.open_lease(
            LeaseGrant(lease, self.place.block_ids[part * needed : (part + 1) * needed], 0, tokens)
        )
        async with asyncio.timeout(_TIMEOUT_S):
            start_s, end_s = await asyncio.gather(self._sending.order(self._number, lease, tokens), filled)
        totals = await self.transfer.leases.close_lease(lease)
        if totals.bytes != tokens * self.case.spec.bytes_per_token:
            raise RuntimeError(f"{totals.bytes} bytes of {tokens} tokens arrived")
        return float(end_s - start_s)

    async def open_idle_lease(self, tokens: int) -> None:
        """Opens a lease for which nothing is sent."""
        await self.transfer.leases.open_lease(LeaseGrant(next(self._leases), self.place.block_ids, 0, tokens))

    @property
    def bytes_received(self) -> int:
        return sum(traffic.bytes_total for traffic in self.transfer.counters().peers.values())

    def _on_filled(self, filled: LeaseTotals) -> None:
        # Both processes read the same clock.
        self._filled.pop(filled.number).set_result(time.monotonic())


@asynccontextmanager
async def open_pairs(cases: Sequence[Case], places: Sequence[Place] | None = None) -> AsyncIterator[list[Pair]]:
    """Connected and warm pairs, all with the same sending process.

    Args:
        places: where each pair receives; None: in new caches.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, tuple(cases)), daemon=True)
    process.start()
    theirs.close()  # otherwise the end of the process would not close the pipe
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
    """A place whose memory is already written, so that the first transfer touches no new page."""
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
    def make(rank: int, on_filled: OnFilled, on_refused: OnRefused) -> KVTransfer:
        settings = TransferSettings(
            incarnation=_INCARNATION,
            transport="ucx",
            peers_are_known=True,
            segment_bytes=case.segment_bytes,
            staging_slots=case.staging_slots,
            digests=case.digests,
            receive_bytes_per_s=case.receive_bytes_per_s,
            heads=(heads_of(rank, ranks=end.ranks, num_kv_heads=case.spec.num_kv_heads),),
        )
        return KVTransfer(caches[rank], settings, on_filled=on_filled, on_refused=on_refused)

    makers = [partial(make, rank) for rank in range(end.ranks)]
    message_bytes = case.segment_bytes + TRAILER_BYTES
    transfer = RankedTransfer(makers, message_bytes=message_bytes)
    transfer.leases.deliver_to(on_filled, _fail)
    return transfer


def _fail(refused: object) -> None:
    raise RuntimeError(f"a benchmark's segment was refused: {refused}")


# ---- in the sending process


def _serve(connection: Connection, cases: Sequence[Case]) -> None:
    torch.set_num_threads(1)
    if cases[0].source.device != "cpu":
        torch.cuda.set_device(cases[0].source.device)
    asyncio.run(_run_orders(connection, cases))


async def _run_orders(connection: Connection, cases: Sequence[Case]) -> None:
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as orders:
        sources = [_new_place(case, case.source, seed=1) for case in cases]
        transfers = []
        for case, source in zip(cases, sources, strict=True):
            transfer = _transfer(case, case.source, source.caches, _fail)
            transfers.append(await stack.enter_async_context(transfer))
            await _accept_connection(transfer, case, connection)

        async def send(pair: int, lease: int, tokens: int) -> None:
            needed = -(-tokens // cases[pair].source.block_size)
            blocks = sources[pair].block_ids[:needed]
            start_s = time.monotonic()
            await transfers[pair].send(
                SendJob(_PEER, _SENDER, lease, _INCARNATION, 0, 0, tokens, tokens, block_ids=blocks)
            )
            connection.send((pair, lease, start_s))

        while (order := await asyncio.to_thread(connection.recv)) is not None:
            orders.create_task(send(*order))


async def _accept_connection(transfer: RankedTransfer, case: Case, connection: Connection) -> None:
    addresses = await asyncio.to_thread(connection.recv)
    connection.send(await transfer.listen(_PEER, case.flows, sends=True))
    await transfer.connect(_PEER, addresses)
    await asyncio.to_thread(connection.recv)  # the receiver has connected too
    connection.send(await transfer.warm_up(_PEER, _SENDER))
    speed = await asyncio.to_thread(connection.recv)
    if not case.fixed_segments:
        await transfer.use_link(_PEER, speed)
