"""Pulls of entries between nodes whose ranks keep unlike parts of them, over real UCX: what is loaded is what was
computed, whatever one rank loses, damages or does not live to send."""

import asyncio
import os
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch

from baton.core.kv_entries import NodeRanks
from baton.kvcache.spec import KVCacheSpec, KVKind
from kvtransfer.entry_links import entry_links
from tests.conformance.kv import as_bytes, eventually
from tests.conformance.kv_child import child
from tests.conformance.pulling import ENTRIES, KEYS, SPEC, a_reader, an_owner, computed, lift_limits, until_stopped

MLA = KVCacheSpec(KVKind.MLA, num_layers=5, num_kv_heads=1, head_dim=96, dtype="bfloat16")
ONE, TWO, FOUR = NodeRanks(1), NodeRanks(2), NodeRanks(4)
OWN = NodeRanks(2, own_requests=True)

UNLIKE = [
    pytest.param(SPEC, ONE, TWO, id="heads-1-to-2"),
    pytest.param(SPEC, TWO, ONE, id="heads-2-to-1"),
    pytest.param(SPEC, FOUR, TWO, id="heads-4-to-2"),
    pytest.param(MLA, ONE, TWO, id="latent-1-to-2"),
    pytest.param(MLA, TWO, ONE, id="latent-2-to-1"),
    pytest.param(MLA, TWO, TWO, id="latent-2-to-2"),
    pytest.param(MLA, FOUR, TWO, id="latent-4-to-2"),
    pytest.param(MLA, ONE, OWN, id="latent-1-to-own-2"),
    pytest.param(MLA, TWO, OWN, id="latent-2-to-own-2"),
    pytest.param(MLA, OWN, ONE, id="latent-own-2-to-1"),
    pytest.param(MLA, OWN, TWO, id="latent-own-2-to-2"),
    pytest.param(MLA, OWN, OWN, id="latent-own-2-to-own-2"),
]


@pytest.fixture(autouse=True)
def _no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    lift_limits(monkeypatch)


def equals_computed(found: torch.Tensor, entries: int, spec: KVCacheSpec) -> bool:
    return torch.equal(as_bytes(found), as_bytes(computed(entries, spec=spec)))


@pytest.mark.parametrize(("spec", "owner_ranks", "reader_ranks"), UNLIKE)
async def test_every_rank_of_the_reader_gets_what_it_keeps(
    spec: KVCacheSpec, owner_ranks: NodeRanks, reader_ranks: NodeRanks
) -> None:
    # The last rank has the request on each side, where ranks have requests of their own.
    kept_by, wanted_by = (each.size - 1 if each.own_requests else None for each in (owner_ranks, reader_ranks))
    async with child(partial(an_owner, spec, owner_ranks)) as owner, a_reader(spec, reader_ranks) as reader:
        assert await owner.call("keep", 4, kept_by) == ENTRIES
        kept = await owner.call("kept")
        assert await reader.pull(kept, KEYS[:5], owner=wanted_by) == 5
        assert await reader.pull(kept, KEYS[5:], owner=wanted_by) == ENTRIES - 5
        count, found = await reader.load(wanted_by)
        assert count == ENTRIES
        assert equals_computed(found, ENTRIES, spec)
        assert reader.pulls.failures == 0
        await eventually(lambda: len(reader.held()) == 1)  # the link alone
        assert len(await owner.call("held")) == 1


async def test_what_only_caches_have_comes_from_the_rank_with_most_of_it() -> None:
    async with an_owner(MLA, OWN) as owner, a_reader(MLA, ONE) as reader:
        for rank, stop in ((0, 1), (1, 8)):
            assert await owner.keep(owner=rank) == ENTRIES
            await owner.forget_but_in_cache(0, stop, rank)
        assert await reader.pull(owner.kept()) == 8
        assert [set(cached.values()) for cached in owner.only_cached.values()] == [{0}, {1}]
        count, found = await reader.load()
        assert count == 8
        assert equals_computed(found, 8, MLA)


@pytest.mark.parametrize(("owner_ranks", "reader_ranks"), [(TWO, ONE), (ONE, TWO)])
@pytest.mark.parametrize("harm", ["damage", "forget"])
async def test_what_one_rank_of_the_owner_has_lost_or_damaged_ends_the_pull_before_it(
    harm: str, owner_ranks: NodeRanks, reader_ranks: NodeRanks
) -> None:
    async with child(partial(an_owner, SPEC, owner_ranks)) as owner, a_reader(SPEC, reader_ranks) as reader:
        assert await owner.call("keep") == ENTRIES
        await owner.call(harm, 4, owner_ranks.size - 1)
        assert await reader.pull(await owner.call("kept")) == 4
        count, found = await reader.load()
        assert count == 4
        assert equals_computed(found, 4, SPEC)
        # Each rank of the reader may read it before it is forgotten.
        damaged = await owner.call("count_damaged")
        assert 1 <= damaged <= reader_ranks.size if harm == "damage" else damaged == 0
        # The damaged entry is forgotten, so the next pull ends before it again.
        assert await reader.pull(await owner.call("kept"), KEYS[4:]) == 0
        assert reader.pulls.failures == 0


async def test_an_owner_that_dies_between_two_ranks_costs_that_pull() -> None:
    async with child(partial(an_owner, SPEC, TWO)) as owner, a_reader(SPEC, ONE) as reader:
        assert await owner.call("keep") == ENTRIES
        kept = await owner.call("kept")
        owner.begin("stop_after", 5)
        await owner.answer()
        pull = asyncio.create_task(reader.pull(kept))
        await until_stopped(owner.pid)
        os.kill(owner.pid, signal.SIGKILL)
        assert await pull == 0
        assert reader.pulls.failures == 1
        await eventually(lambda: not reader.held())
        count, found = await reader.load()
        assert count < ENTRIES
        assert equals_computed(found, count, SPEC)


async def test_an_owner_whose_ranks_are_other_than_the_gateway_says_refuses() -> None:
    async with an_owner(SPEC, TWO) as owner, a_reader(SPEC, ONE) as reader:
        assert await owner.keep() == ENTRIES
        for ranks in (ONE, FOUR, NodeRanks(0), NodeRanks(1000), NodeRanks(3)):
            assert await reader.pull(replace(owner.kept(), ranks=ranks)) == 0
            reader.pulls._not_before_s.clear()
        assert reader.pulls.failures == 5
        await eventually(lambda: not reader.held() and not owner.held())
        assert await reader.pull(owner.kept()) == ENTRIES


def test_ranks_that_keep_the_same_of_an_entry_exchange_it_whole() -> None:
    assert set(entry_links(SPEC, owner=TWO, reader=TWO).values()) == {()}
    assert set(entry_links(MLA, owner=ONE, reader=OWN).values()) == {()}
    assert set(entry_links(MLA, owner=OWN, reader=OWN).values()) == {()}
    assert () not in entry_links(SPEC, owner=ONE, reader=TWO).values()
    assert () not in entry_links(MLA, owner=TWO, reader=ONE).values()
