"""Pulls of recurrent states between nodes of like and unlike ranks, over real UCX: a state comes whole, with the
entries before it, or not at all."""

import asyncio
import os
import signal
from dataclasses import replace
from functools import partial

import pytest
import torch

from baton.core.kv_entries import NodeRanks
from baton.kvcache.spec import KVCacheSpec, KVKind
from tests.conformance import pulling
from tests.conformance.kv import as_bytes, eventually
from tests.conformance.kv_child import child
from tests.conformance.pulling import (
    ENTRIES,
    KEYS,
    PullingNode,
    computed,
    computed_state,
    lift_limits,
    until_stopped,
)

# A piece has several layers of the state; or some heads of one layer, because a layer is larger than an entry.
STATE = KVCacheSpec(KVKind.STATE, num_layers=3, num_kv_heads=8, head_dim=2000, dtype="float32")
SPEC = KVCacheSpec(KVKind.GQA, num_layers=2, num_kv_heads=8, head_dim=32, dtype="float32", state=STATE)
LARGE = replace(SPEC, state=replace(STATE, head_dim=20_000))
# Fewer kv heads than ranks: some links carry a part of the state, and no KV or some layers of it.
FEW_HEADS = replace(LARGE, num_kv_heads=2)
ONE, TWO, FOUR = NodeRanks(1), NodeRanks(2), NodeRanks(4)
an_owner, a_reader = partial(pulling.an_owner, places=120), partial(pulling.a_reader, places=120)


@pytest.fixture(autouse=True)
def _no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    lift_limits(monkeypatch)


async def assert_loads(reader: PullingNode, after: int) -> None:
    """The state after that many entries, and all of them, are what was computed."""
    count, tokens, state = await reader.load_state(after)
    assert count == after + 1
    assert torch.equal(as_bytes(tokens), as_bytes(computed(after, spec=reader.spec)))
    assert torch.equal(state, computed_state(reader.spec, after))


@pytest.mark.parametrize(
    ("spec", "of_owner", "of_reader"),
    [
        pytest.param(SPEC, ONE, ONE, id="1-to-1"),
        pytest.param(LARGE, TWO, TWO, id="large-2-to-2"),
        pytest.param(SPEC, ONE, TWO, id="1-to-2"),
        pytest.param(SPEC, TWO, ONE, id="2-to-1"),
        pytest.param(LARGE, ONE, TWO, id="large-1-to-2"),
        pytest.param(LARGE, FOUR, TWO, id="large-4-to-2"),
        pytest.param(FEW_HEADS, FOUR, ONE, id="few-heads-4-to-1"),
        pytest.param(FEW_HEADS, ONE, FOUR, id="few-heads-1-to-4"),
    ],
)
async def test_the_last_state_of_use_comes_with_the_entries_before_it(
    spec: KVCacheSpec, of_owner: NodeRanks, of_reader: NodeRanks
) -> None:
    async with child(partial(an_owner, spec, of_owner)) as owner, a_reader(spec, of_reader) as reader:
        assert await owner.call("keep") == ENTRIES
        for after in (4, 7, 10):
            assert await owner.call("keep_state", after) == 1
        kept = await owner.call("kept")
        assert await reader.pull_state(kept, KEYS[:9], every=4) == 4
        await assert_loads(reader, 4)
        served = await owner.call("count_served")
        # The reader has the entries up to the state now, and a state that it can go on from.
        assert await reader.pull_state(kept, KEYS[4:], resumed=4 * 64) == 6
        await assert_loads(reader, 10)
        assert await owner.call("count_served") > served
        assert reader.pulls.failures == 0
        assert reader.count_damaged() == await owner.call("count_damaged") == 0
        await eventually(lambda: len(reader.held()) == 1)  # the link alone
        assert len(await owner.call("held")) == 1


@pytest.mark.parametrize("ranks", [(ONE, ONE), (TWO, ONE)])
async def test_a_state_alone_comes_where_the_entries_are(ranks: tuple[NodeRanks, NodeRanks]) -> None:
    async with an_owner(SPEC, ranks[0]) as owner, a_reader(SPEC, ranks[1]) as reader:
        await owner.keep()
        await owner.keep_state(10)
        assert await reader.pull(owner.kept(), KEYS) == ENTRIES
        served = owner.count_served()
        assert await reader.pull_state(owner.kept(), KEYS[9:], held=3, resumed=0) == 1
        messages = owner.count_served() - served
        assert 0 < messages < 6  # of pieces
        await assert_loads(reader, 10)


@pytest.mark.parametrize("ranks", [(ONE, ONE), (TWO, ONE)])
async def test_without_a_state_nothing_comes_and_nothing_makes_room_for_it(
    ranks: tuple[NodeRanks, NodeRanks],
) -> None:
    async with an_owner(SPEC, ranks[0]) as owner, a_reader(SPEC, ranks[1]) as reader:
        await owner.keep()
        await owner.keep_state(3)
        for keys, held, every in ((KEYS[3:], 0, 1), (KEYS, 0, 4), (KEYS[2:], 1, 2)):
            assert await reader.pull_state(owner.kept(), keys, held=held, every=every) == 0
        # One rank alone has lost a piece.
        await owner.keep_state(9)
        await owner.forget_state(9, rank=ranks[0].size - 1)
        assert await reader.pull_state(owner.kept(), KEYS[3:], held=0) == 0
        # An entry before the state is gone.
        await owner.keep_state(8)
        await owner.forget(7)
        assert await reader.pull_state(owner.kept(), KEYS[3:], held=0) == 0
        assert owner.count_served() == 0
        assert reader.pulls.failures == 0
        assert (await reader.load())[0] == 0
        assert reader.held() == [each for each in reader.held() if each.startswith("link")]


async def test_a_reader_without_room_for_all_of_it_pulls_nothing() -> None:
    async with an_owner(LARGE, ONE) as owner, a_reader(LARGE, ONE, places=22) as reader:
        await owner.keep()
        await owner.keep_state(10)
        assert await reader.pull_state(owner.kept(), KEYS) == 0
        assert owner.count_served() == 0
        assert reader.pulls.failures == 0
        await eventually(lambda: len(reader.held()) == 1)


@pytest.mark.parametrize("ranks", [(ONE, ONE), (TWO, ONE), (ONE, TWO)])
async def test_a_damaged_piece_never_becomes_a_part_of_a_state(ranks: tuple[NodeRanks, NodeRanks]) -> None:
    async with an_owner(LARGE, ranks[0]) as owner, a_reader(LARGE, ranks[1]) as reader:
        await owner.keep()
        await owner.keep_state(6)
        await owner.keep_state(10)
        await owner.damage_state(10, rank=ranks[0].size - 1)
        await reader.pull_state(owner.kept(), KEYS)
        count, _, _ = await reader.load_state(10)
        assert count <= 10
        # Who cuts a piece sees the damage, else the reader does; who sees it forgets the piece.
        assert owner.count_damaged() + reader.count_damaged() == 1
        # Its other pieces are not taken for a state any more.
        assert await reader.transfer.entries.find_state(KEYS) in (0, 6)
        if ranks[0] != ranks[1]:
            assert await reader.pull_state(owner.kept(), KEYS) == 6
            await assert_loads(reader, 6)
        assert reader.pulls.failures == 0


@pytest.mark.parametrize("ranks", [(ONE, ONE), (TWO, ONE)])
async def test_an_owner_that_dies_while_it_sends_a_state_costs_that_pull(ranks: tuple[NodeRanks, NodeRanks]) -> None:
    async with child(partial(an_owner, LARGE, ranks[0])) as owner, a_reader(LARGE, ranks[1]) as reader:
        assert await owner.call("keep") == ENTRIES
        assert await owner.call("keep_state", 4) == 1
        kept = await owner.call("kept")
        owner.begin("stop_after", 4 * ranks[0].size + 2)  # in the middle of the state
        await owner.answer()
        pull = asyncio.create_task(reader.pull_state(kept, KEYS))
        await until_stopped(owner.pid)
        os.kill(owner.pid, signal.SIGKILL)
        assert await pull == 0
        assert reader.pulls.failures == 1
        await eventually(lambda: not reader.held())
        count, tokens, _ = await reader.load_state(4)
        assert count <= 4
        assert torch.equal(as_bytes(tokens), as_bytes(computed(count, spec=LARGE)))
