"""Nodes of several ranks for the matrix of `kv_matrix`: each rank has its own cache and transfer.

The prefill side may be in another process. Both sides generate the planted bytes by themselves, and only the transfer's
messages carry bytes between them.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kvcache.cache import PagedKVCache
from baton.kvcache.spec import KVCacheShape, KVCacheSpec
from kvtransfer.flows import Flow, RankPair, part_flows
from kvtransfer.leases import LeaseGrant, LeaseTotals
from kvtransfer.rank_transfer import OnFilled, OnRefused
from kvtransfer.ranked import RankedTransfer
from kvtransfer.records import RefusedSegment
from kvtransfer.segments import TRAILER_BYTES, Segment
from kvtransfer.settings import TransferSettings
from kvtransfer.transfer import KVTransfer
from tests.conformance.kv import DEADLINE_S, DECODE_INCARNATION, PREFILL_INCARNATION, eventually, job
from tests.conformance.kv_matrix import (
    LONGEST,
    UNTOUCHED_D,
    UNTOUCHED_P,
    Bytes,
    Case,
    Nodes,
    Request,
    Side,
    Trial,
    case_of,
    heads_of_rank,
    planted,
    untouched,
)

# As the receiver draws them for the sender's ranks, and as the sender numbers the receiver's.
SENDER, PEER = 7, 64
# Salts of the planted bytes: for the request, and for the request that it shares blocks with on P.
SALT, OTHER_SALT = 1, 2
AXES = ("layer", "k/v", "block", "slot", "head", "byte")


@dataclass
class Node:
    """One side: its ranks' caches and transfers.

    Attributes:
        filled: by rank, the totals that the rank reported.
        whole: the totals that the node reported.
    """

    nodes: Nodes
    side: Side
    incarnation: int
    ranks: list[KVTransfer] = field(default_factory=list)
    filled: list[list[LeaseTotals]] = field(default_factory=list)
    whole: list[LeaseTotals] = field(default_factory=list)
    refused: list[RefusedSegment] = field(default_factory=list)

    def __post_init__(self) -> None:
        side = self.side
        num_blocks = 2 * -(-(LONGEST + 1) // side.block_size) + 1
        shape = KVCacheShape(side.layout, side.block_size, num_blocks)
        self.spec = self.nodes.spec
        self.caches = [
            PagedKVCache(replace(self.spec, num_kv_heads=len(self.heads(rank))), shape) for rank in range(side.ranks)
        ]
        self.transfer = RankedTransfer(
            [partial(self._make, rank) for rank in range(side.ranks)],
            message_bytes=self.nodes.segment_bytes + TRAILER_BYTES,
        )
        self.transfer.leases.deliver_to(self.whole.append, self.refused.append)

    def _make(self, rank: int, on_filled: OnFilled, on_refused: OnRefused) -> KVTransfer:
        reported: list[LeaseTotals] = []

        def tell(totals: LeaseTotals) -> None:
            reported.append(totals)
            on_filled(totals)

        heads = self.heads(rank)
        settings = TransferSettings(
            incarnation=self.incarnation,
            transport="ucx",
            peers_are_known=True,
            segment_bytes=self.nodes.segment_bytes,
            staging_slots=3,
            digests=self.nodes.digests,
            heads=(range(heads[0], heads[-1] + 1),),
        )
        transfer = KVTransfer(self.caches[rank], settings, on_filled=tell, on_refused=on_refused)
        self.ranks.append(transfer)
        self.filled.append(reported)
        return transfer

    def heads(self, rank: int) -> tuple[int, ...]:
        return heads_of_rank(rank, ranks=self.side.ranks, heads=self.spec.num_kv_heads)

    def case(self, request: Request) -> Case:
        return case_of(request, block_p=self.nodes.block_p, block_d=self.nodes.block_d)

    def blocks(self, request: int, num_tokens: int) -> tuple[int, ...]:
        """Blocks of a request and its first decoded token; requests 0 and 1 share none."""
        shape = self.caches[0].shape
        order = np.random.default_rng(shape.num_blocks).permutation(shape.num_blocks)
        return tuple(int(block) for block in order[request::2][: shape.blocks_for(num_tokens + 1)])

    def fill_caches(self, *, salt: int) -> None:
        """Fills them with bytes that are never sent."""
        for cache in self.caches:
            cache.memory.numpy()[:] = untouched(cache.size_bytes, salt=salt)

    def check_nothing_is_left(self) -> None:
        """Nothing is in flight, open or waiting, every staging slot is free, and nothing was ever refused."""
        for number, rank in enumerate(self.ranks):
            thread = rank._thread
            pools = (*thread.sender._pools._made.values(), *thread.receiver._pools._made.values())
            left = {
                "in flight": thread._in_flight,
                "leases": thread.receiver.open_leases,
                "jobs": len(thread.sender._jobs),
                "staging slots": sum(pool.slots - pool.available for pool in pools),
                **{refusal.name: count for refusal, count in rank.counters().refusals.items()},
                "stuck": rank.stuck(after_s=DEADLINE_S),
            }
            assert not any(left.values()), f"rank {number}: {left}"


def links_of(nodes: Nodes) -> Mapping[RankPair, tuple[Flow, ...]]:
    return part_flows(nodes.spec, senders=nodes.ranks_p, receivers=nodes.ranks_d)


def bytes_of(spec: KVCacheSpec, case: Case) -> tuple[Bytes, Bytes]:
    """P's bytes of the request, and of the other one, which begins alike: [L, K, T, H, bytes of a row]."""
    ours, others = (planted(spec, case.num_tokens, salt=salt) for salt in (SALT, OTHER_SALT))
    others[:, :, : case.cached_p] = ours[:, :, : case.cached_p]
    return ours, others


def other_of(case: Case) -> Case:
    """The request with which P shares blocks: all of it that is read goes to D."""
    return replace(case, cached_d=0, resume_at=case.num_tokens, chunks="one")


def write(memory: Tensor, blocks: tuple[int, ...], values: Bytes, read_LT: NDArray[np.bool_] | None = None) -> None:
    """Writes the bytes of a request, or those cells of it only, into its blocks.

    Args:
        memory: [L, K, B, N, H, C] of a cache.
        values: [L, K, T, H, bytes of a row], with the heads of the cache.
    """
    view, block_size = memory.view(torch.uint8).numpy(), memory.shape[3]
    for layer in range(len(view)):
        token_T = np.arange(values.shape[2]) if read_LT is None else np.flatnonzero(read_LT[layer])
        places = np.asarray(blocks)[token_T // block_size], token_T % block_size
        view[layer][:, places[0], places[1]] = values[layer][:, token_T]


class Prefill:
    """The P side: one node after another, by commands."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._opened: Node | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def _node(self) -> Node:
        assert self._opened is not None
        return self._opened

    async def open(self, nodes: Nodes) -> dict[RankPair, bytes]:
        """Makes a node, in place of the one before; returns where it listens."""
        await self._stack.aclose()
        self._opened = node = Node(nodes, nodes.prefill, PREFILL_INCARNATION)
        await self._stack.enter_async_context(node.transfer)
        return await node.transfer.listen(PEER, links_of(nodes), sends=True)

    async def connect(self, addresses: Mapping[RankPair, bytes], message_bytes: int) -> None:
        await self._node.transfer.connect(PEER, addresses, message_bytes=message_bytes)

    async def send(self, request: Request, lease: int) -> int:
        """Plants a request and sends it; at the same time, under the lease's next number, the one that it shares blocks
        with. Returns the bytes sent."""
        node = self._node
        case = node.case(request)
        blocks, other_blocks = node.blocks(0, case.num_tokens), node.blocks(1, case.num_tokens)
        shared = case.cached_p // node.side.block_size
        other_blocks = blocks[:shared] + other_blocks[shared:]
        ours, others = bytes_of(node.spec, case)
        node.fill_caches(salt=UNTOUCHED_P)
        for rank, cache in enumerate(node.caches):
            if case.cached_p:
                write(cache.view, other_blocks, others[:, :, :, node.heads(rank)])
            write(cache.view, blocks, ours[:, :, :, node.heads(rank)])
        before = [cache.memory.clone() for cache in node.caches]
        sending = [self._send(case, lease, blocks)]
        if case.cached_p:
            sending.append(self._send(other_of(case), lease + 1, other_blocks))
        sent = await asyncio.gather(*sending)
        for cache, was in zip(node.caches, before, strict=True):
            assert torch.equal(cache.memory, was), "sending has changed P's cache"
        return sum(sent)

    async def _send(self, case: Case, lease: int, blocks: tuple[int, ...]) -> int:
        segments: list[Segment] = []
        for start, stop in case.jobs:
            first = max((segment.number + 1 for segment in segments), default=0)
            part = job(lease, blocks, start, stop, resume_at=case.resume_at, first_segment=first)
            segments += await self._node.transfer.send(replace(part, peer=PEER, sender_number=SENDER))
        return sum(segment.payload_bytes for segment in segments)

    async def end(self) -> tuple[int, ...]:
        """Checks that nothing is left, and disconnects; returns the leases that had begun."""
        self._node.check_nothing_is_left()
        return await self._node.transfer.disconnect(PEER)


class Call(Protocol):
    """Calls a method of a `Prefill`, in this process or another."""

    def __call__(self, method: str, *arguments: Any) -> Awaitable[Any]: ...


async def run_trial(trial: Trial, prefill: Call) -> None:
    """Hands every request of a trial over, and checks all that must hold after each."""
    nodes = trial.nodes
    node = Node(nodes, nodes.decode, DECODE_INCARNATION)
    async with node.transfer as transfer:
        theirs = await prefill("open", nodes)
        ours = await transfer.listen(SENDER, links_of(nodes), sends=False)
        await transfer.connect(SENDER, theirs)
        await prefill("connect", ours, transfer.message_bytes)
        for number, request in enumerate(trial.requests):
            await _hand_over(node, request, 2 * number, prefill)
        assert await prefill("end") == (), "leases that P had begun to fill"
        node.check_nothing_is_left()
        assert await transfer.disconnect(SENDER) == (), "leases that had begun to be filled"
    for reported in (*node.filled, node.whole):
        assert len({totals.number for totals in reported}) == len(reported), "a lease is filled once"


async def _hand_over(node: Node, request: Request, lease: int, prefill: Call) -> None:
    """One request, and the one that it shares blocks with on P, if there is one, under the next number."""
    case = node.case(request)
    cases = [case, other_of(case)] if case.cached_p else [case]
    node.fill_caches(salt=UNTOUCHED_D)
    expected = [_expected(node, rank, cases) for rank in range(node.side.ranks)]
    for index, each in enumerate(cases):
        blocks = node.blocks(index, case.num_tokens)
        grant = LeaseGrant(lease + index, blocks, each.cached_d, each.num_tokens, each.resume_at)
        await node.transfer.leases.open_lease(grant)
    before = node.transfer.counters().peers[SENDER].bytes_total
    sent = await prefill("send", request, lease)
    await eventually(lambda: len(_of(node.whole, lease)) >= len(cases) or bool(node.refused))
    assert not node.refused, f"refused: {[each.refusal.name for each in node.refused]}"
    totals = [await node.transfer.leases.close_lease(lease + index) for index in range(len(cases))]
    for rank, cache in enumerate(node.caches):
        _compare(cache, expected[rank][0], f"rank {rank}")
        _equal(f"filled, of rank {rank}", _of(node.filled[rank], lease), expected[rank][1])
    whole = [sum(each) for each in zip(*(of_rank for _, of_rank in expected), strict=True)]
    _equal("filled, of all ranks", _of(node.whole, lease), whole)
    _equal("closed", [each.bytes for each in totals], whole)
    moved = node.transfer.counters().peers[SENDER].bytes_total - before
    _equal("sent and moved", [sent, moved], [sum(whole)] * 2)


def _expected(node: Node, rank: int, cases: list[Case]) -> tuple[Tensor, list[int]]:
    """A rank's expected cache, as a view like its own, and the number of bytes of each case."""
    cache, heads, num_tokens = node.caches[rank], node.heads(rank), cases[0].num_tokens
    memory = cache.storage.clone().as_strided(cache.view.shape, cache.view.stride())
    num_bytes = []
    for index, (case, values) in enumerate(zip(cases, bytes_of(node.spec, cases[0]), strict=False)):
        held, read_LT = values[:, :, :, heads], case.reads(node.spec)
        write(memory, node.blocks(index, num_tokens), held, read_LT)
        num_bytes.append(int(read_LT.sum()) * held[0, :, 0].nbytes)
    return memory, num_bytes


def _of(reported: list[LeaseTotals], lease: int) -> list[int]:
    """The bytes of the leases from that one on, by their numbers."""
    return [each.bytes for each in sorted(reported, key=attrgetter("number")) if each.number >= lease]


def _equal(what: str, got: list[int], expected: list[int]) -> None:
    assert got == expected, f"bytes {what}: {got} and not {expected}"


def _compare(cache: PagedKVCache, expected: Tensor, where: str) -> None:
    got, wanted = cache.view.view(torch.uint8), expected.view(torch.uint8)
    if torch.equal(got, wanted):
        return
    wrong = (got != wanted).nonzero()
    places = ", ".join(f"{axis} {int(place)}" for axis, place in zip(AXES, wrong[0], strict=True))
    raise AssertionError(f"{where}: {len(wrong)} bytes are wrong, the first at {places}")
