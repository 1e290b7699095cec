"""KV of requests that one rank owns: it goes from the owner to the owner, and no other rank's cache is read or changed.

The other node may be of either kind. Ranks share this process, as in `test_kv_ranks`.
"""

import asyncio
from dataclasses import replace
from itertools import product

import pytest
import torch

from baton.core.errors import DataLoss
from baton.kvcache.spec import KVCacheSpec, KVKind
from kvtransfer.leases import LeaseGrant
from kvtransfer.records import SendJob
from tests.conformance.kv import as_bytes, eventually, job, plant, scattered_blocks, tokens_of
from tests.conformance.ranked_nodes import PEER, SENDER, fill, linked

MLA = KVCacheSpec(KVKind.MLA, num_layers=5, num_kv_heads=1, head_dim=6, dtype="bfloat16")
WITH_INDEX = replace(MLA, index=replace(MLA, num_layers=3, head_dim=4))
TOKENS = 37
OWNERS = [pair for pair in product((None, 0, 1), repeat=2) if pair != (None, None)]


@pytest.mark.parametrize("transport", ["loopback", "ucx"])
@pytest.mark.parametrize(("owner_p", "owner_d"), OWNERS)
async def test_kv_goes_from_owner_to_owner_and_nowhere_else(
    transport: str, owner_p: int | None, owner_d: int | None
) -> None:
    """None: the ranks of that node share every request."""
    async with linked(MLA, 2, 2, transport=transport, whole_requests=owner_p is not None) as nodes:
        prefill, decode = nodes.prefill, nodes.decode
        blocks_p = scattered_blocks(prefill.caches[0], TOKENS, 1)
        blocks_d = scattered_blocks(decode.caches[0], TOKENS, 2)
        for rank, cache in enumerate(prefill.caches):
            cache.view.fill_(9.0)  # of others' requests, in blocks of the same numbers
            if owner_p in (None, rank):
                plant(cache, blocks_p, TOKENS)
        expected = tokens_of(prefill.caches[owner_p or 0], blocks_p, TOKENS)
        for cache in decode.caches:
            cache.view.fill_(-7.0)
        before = [cache.view.clone() for cache in decode.caches]
        filled = await fill(nodes, blocks_p, blocks_d, 5, 22, TOKENS, owners=(owner_p, owner_d))
        totals = await decode.transfer.leases.close_lease(filled.number)
        copies = 2 if owner_d is None else 1
        assert totals.bytes == (TOKENS - 5) * MLA.bytes_per_token * copies
        for rank, (cache, wanted) in enumerate(zip(decode.caches, before, strict=True)):
            if owner_d in (None, rank):
                assert torch.equal(tokens_of(cache, blocks_d, TOKENS)[:, :, 5:], expected[:, :, 5:])
            else:
                assert torch.equal(as_bytes(cache.view), as_bytes(wanted)), f"rank {rank}"
        assert decode.events.refused == []


def _job_to(blocks: tuple[int, ...], *, rank: int) -> SendJob:
    """For the lease of the rank's number."""
    return job(rank, blocks, 0, TOKENS, peer=PEER, sender_number=SENDER, owner_there=rank)


async def test_an_index_goes_with_the_kv() -> None:
    async with linked(WITH_INDEX, 2, 2, transport="loopback", whole_requests=True) as nodes:
        blocks_p = scattered_blocks(nodes.prefill.caches[1], TOKENS, 1)
        blocks_d = scattered_blocks(nodes.decode.caches[0], TOKENS, 2)
        filled = await fill(nodes, blocks_p, blocks_d, 0, TOKENS, owners=(1, 0))
        assert filled.bytes == TOKENS * WITH_INDEX.bytes_per_token


async def test_two_ranks_receive_their_own_requests_at_once() -> None:
    async with linked(MLA, 1, 2, transport="loopback") as nodes:
        blocks = scattered_blocks(nodes.prefill.caches[0], TOKENS, 1)
        plant(nodes.prefill.caches[0], blocks, TOKENS)
        for owner in (0, 1):
            blocks_d = scattered_blocks(nodes.decode.caches[owner], TOKENS, 2)
            await nodes.decode.transfer.leases.open_lease(LeaseGrant(owner, blocks_d, 0, TOKENS, owner=owner))
        await asyncio.gather(*(nodes.prefill.transfer.send(_job_to(blocks, rank=owner)) for owner in (0, 1)))
        await eventually(lambda: len(nodes.decode.events.filled) == 2)
        assert {filled.bytes for filled in nodes.decode.events.filled} == {TOKENS * MLA.bytes_per_token}


async def test_a_job_for_a_rank_that_the_peer_has_not_is_refused() -> None:
    """A ticket may name any rank."""
    async with linked(MLA, 1, 2, transport="loopback") as nodes:
        blocks = scattered_blocks(nodes.prefill.caches[0], TOKENS, 1)
        with pytest.raises(DataLoss, match="no such rank"):
            await nodes.prefill.transfer.send(_job_to(blocks, rank=2))


async def test_kv_for_the_wrong_rank_is_refused_there() -> None:
    async with linked(MLA, 1, 2, transport="loopback") as nodes:
        blocks = scattered_blocks(nodes.prefill.caches[0], TOKENS, 1)
        plant(nodes.prefill.caches[0], blocks, TOKENS)
        before = [cache.view.clone() for cache in nodes.decode.caches]
        blocks_d = scattered_blocks(nodes.decode.caches[0], TOKENS, 2)
        await nodes.decode.transfer.leases.open_lease(LeaseGrant(0, blocks_d, 0, TOKENS, owner=0))
        await nodes.prefill.transfer.send(replace(_job_to(blocks, rank=1), lease=0))
        await eventually(lambda: len(nodes.decode.events.refused) > 0 or nodes.decode.transfer.counters().refused > 0)
        assert nodes.decode.events.filled == []
        for cache, wanted in zip(nodes.decode.caches, before, strict=True):
            assert torch.equal(as_bytes(cache.view), as_bytes(wanted))
        await nodes.decode.transfer.leases.close_lease(0)
