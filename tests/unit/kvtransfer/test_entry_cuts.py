"""Pieces of entries: together they are the entry, and damage on any way to them shows."""

from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton.core.kv_entries import ENTRY_TOKENS, EntryKey, NodeRanks
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from baton.kvcache.wire.digest import digest
from kvtransfer import pull_receiver
from kvtransfer.entry_cuts import EntryCut, LinkCuts, cells_of, complete, cuts_of
from kvtransfer.entry_links import entry_links
from kvtransfer.entry_pulls import EntryPulls
from kvtransfer.flows import Flow
from kvtransfer.parts import parts_of
from kvtransfer.pull_sender import INDEX_BITS
from kvtransfer.records import EntryLink, PullJob
from kvtransfer.segments import TRAILER_BYTES
from kvtransfer.stores.entry import EntryLayout
from kvtransfer.transports.loopback import LoopbackTransport
from tests.conformance.ranked_nodes import held_by, of_rank
from tests.unit.kvtransfer.offloading import World, keys_of

INDEX = KVCacheSpec(KVKind.MLA, num_layers=3, num_kv_heads=1, head_dim=5, dtype="float32")
SPECS = {
    "heads": KVCacheSpec(KVKind.GQA, num_layers=3, num_kv_heads=4, head_dim=6, dtype="bfloat16"),
    "latent": KVCacheSpec(KVKind.MLA, num_layers=5, num_kv_heads=1, head_dim=7, dtype="float16"),
    "latent and index": KVCacheSpec(KVKind.MLA, num_layers=3, num_kv_heads=1, head_dim=6, dtype="float32", index=INDEX),
}
SMALL = KVCacheSpec(KVKind.STATE, num_layers=5, num_kv_heads=8, head_dim=40, dtype="float32")
WITH_STATES = {
    # Several layers of a state in a piece; some heads of one layer; heads of KV that several ranks have.
    "layers": replace(SPECS["heads"], state=SMALL),
    "heads of a layer": replace(SPECS["heads"], state=replace(SMALL, head_dim=1000)),
    "one kv head": replace(SPECS["heads"], num_kv_heads=1, state=SMALL),
}
KEYS = keys_of(3)
KEY = KEYS[0]


def layout_of(spec: KVCacheSpec, rank: int, ranks: int) -> EntryLayout:
    held = held_by(spec, rank, ranks)
    return EntryLayout(parts_of(of_rank(spec, held), held))


def an_entry(layout: EntryLayout, spec: KVCacheSpec, rank: int, ranks: int) -> Tensor:
    """What a rank keeps of one sequence's KV."""
    entry = torch.zeros(layout.entry_bytes, dtype=torch.uint8)
    for form, whole_part, held in zip(layout.messages, spec.parts, held_by(spec, rank, ranks), strict=True):
        shape = whole_part.num_layers, whole_part.kv_factor, ENTRY_TOKENS, whole_part.num_kv_heads
        generator = torch.Generator().manual_seed(form.number)
        size = whole_part.head_dim * whole_part.itemsize
        whole = torch.randint(256, (*shape, size), dtype=torch.uint8, generator=generator)
        entry[form.start : form.start + form.size - TRAILER_BYTES] = whole[:, :, :, held.start : held.stop].reshape(-1)
    complete(layout, (KEY, layout.messages), entry, between=lambda: None)
    return entry


def cuts_for(layout: EntryLayout, flows: tuple[Flow, ...]) -> LinkCuts:
    cuts = cuts_of(layout, EntryLink(0, flows))
    assert cuts is not None
    return cuts


def cut_for(layout: EntryLayout, flows: tuple[Flow, ...]) -> EntryCut:
    cut = cuts_for(layout, flows).entry
    assert cut is not None
    return cut


def cut(each: EntryCut, key: EntryKey, entry: Tensor, message: Tensor) -> bool:
    return each.cut(key, entry, message, named=key, between=lambda: None)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("owners", "readers"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_the_pieces_of_all_links_are_what_the_reader_would_have_kept(name: str, owners: int, readers: int) -> None:
    spec = SPECS[name]
    layouts = [layout_of(spec, rank, readers) for rank in range(readers)]
    joined = [torch.zeros(layout.entry_bytes, dtype=torch.uint8) for layout in layouts]
    cells = [0] * readers
    for link, flows in entry_links(spec, owner=NodeRanks(owners), reader=NodeRanks(readers)).items():
        there = layout_of(spec, link.sender_rank, owners)
        entry = an_entry(there, spec, link.sender_rank, owners)
        if not flows:  # both keep the same
            assert there.entry_bytes == layouts[link.receiver_rank].entry_bytes
            cells[link.receiver_rank] = cells_of(layouts[link.receiver_rank].messages)
            joined[link.receiver_rank] = entry
            continue
        ours, join = cut_for(there, flows), cut_for(layouts[link.receiver_rank], flows)
        assert ours.message_bytes == join.message_bytes
        message = torch.zeros(ours.message_bytes, dtype=torch.uint8)
        assert cut(ours, KEY, entry, message)
        assert join.join(KEY, message, joined[link.receiver_rank], between=lambda: None)
        cells[link.receiver_rank] += join.cells
    for rank, (layout, found) in enumerate(zip(layouts, joined, strict=True)):
        assert cells[rank] == cells_of(layout.messages)
        complete(layout, (KEY, layout.messages), found, between=lambda: None)
        assert torch.equal(found, an_entry(layout, spec, rank, readers))


def a_state(layout: EntryLayout, spec: KVCacheSpec, after: EntryKey) -> list[Tensor]:
    """The pieces that a rank keeps of one state."""
    assert spec.state is not None
    size = spec.state.head_dim * spec.state.itemsize
    generator = torch.Generator().manual_seed(5)
    shape = spec.state.num_layers, spec.state.num_kv_heads, size
    whole = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
    first = spec.part_layers[-1].start
    pieces = []
    for key, form in zip(layout.state_keys(after), layout.pieces, strict=True):
        piece = torch.zeros(form.size, dtype=torch.uint8)
        layers = slice(form.layers.start - first, form.layers.stop - first)
        piece[:-TRAILER_BYTES] = whole[layers, form.heads.start : form.heads.stop].reshape(-1)
        complete(layout, (key, (form,)), piece, between=lambda: None)
        pieces.append(piece)
    return pieces


@pytest.mark.parametrize("name", WITH_STATES)
@pytest.mark.parametrize(("owners", "readers"), [(1, 2), (2, 1), (2, 4), (4, 2), (4, 1)])
def test_the_pieces_of_a_state_become_those_that_the_reader_would_have_kept(
    name: str, owners: int, readers: int
) -> None:
    spec = WITH_STATES[name]
    layouts = [layout_of(spec, rank, readers) for rank in range(readers)]
    joined = [[torch.zeros(form.size, dtype=torch.uint8) for form in layout.pieces] for layout in layouts]
    cells = [[0] * len(layout.pieces) for layout in layouts]
    for link, flows in entry_links(spec, owner=NodeRanks(owners), reader=NodeRanks(readers)).items():
        there, here = layout_of(spec, link.sender_rank, owners), link.receiver_rank
        keys, kept = there.state_keys(KEY), a_state(there, spec, KEY)
        ours, theirs = cuts_for(there, flows).state, cuts_for(layouts[here], flows).state
        for (number, each), (target, join) in zip(ours, theirs, strict=True):
            assert each.message_bytes == join.message_bytes
            message = torch.zeros(each.message_bytes, dtype=torch.uint8)
            assert each.cut(keys[number], kept[number], message, named=KEY, between=lambda: None)
            assert not join.join(KEYS[1], message.clone(), joined[here][target], between=lambda: None)
            assert join.join(KEY, message, joined[here][target], between=lambda: None)
            cells[here][target] += join.cells
    for layout, found, count in zip(layouts, joined, cells, strict=True):
        assert count == [cells_of([form]) for form in layout.pieces]
        for key, form, piece in zip(layout.state_keys(KEY), layout.pieces, found, strict=True):
            complete(layout, (key, (form,)), piece, between=lambda: None)
        assert all(map(torch.equal, found, a_state(layout, spec, KEY)))


@pytest.mark.parametrize("harm", ["a bit", "a trailer", "another entry"])
def test_nothing_is_cut_from_or_joined_to_an_entry_that_is_damaged_or_another_one(harm: str) -> None:
    spec = SPECS["heads"]
    owner, reader = layout_of(spec, 0, 1), layout_of(spec, 1, 2)
    flows = entry_links(spec, owner=NodeRanks(1), reader=NodeRanks(2))
    (to_second,) = (flow for link, flow in flows.items() if link.receiver_rank == 1)
    ours, join = cut_for(owner, to_second), cut_for(reader, to_second)
    entry = an_entry(owner, spec, 0, 1)
    message, joined = (torch.zeros(size, dtype=torch.uint8) for size in (ours.message_bytes, reader.entry_bytes))
    key = KEYS[1] if harm == "another entry" else KEY
    if harm != "another entry":
        size = owner.messages[0].size
        # A bit of the heads that are not sent, too: nobody can say which bits of a damaged entry are right.
        entry[0 if harm == "a bit" else size - 1] ^= 1
    assert not cut(ours, key, entry, message)
    assert cut(ours, KEY, an_entry(owner, spec, 0, 1), message)
    if harm != "another entry":
        message[3 if harm == "a bit" else ours.message_bytes - 100] ^= 1
        last = join._pieces[-1].stop
        message[last - 1] ^= harm == "a trailer"
    assert not join.join(key, message, joined, between=lambda: None)


class Reader:
    """Rank 0 of a node of one rank, and two links over which a test sends what ranks of another node might."""

    LINKS = 1 << 40, 1 << 41

    def __init__(self, *, own_requests: bool = False) -> None:
        owner = NodeRanks(2, own_requests=own_requests)
        self.spec = replace(SPECS["heads"], dtype="float32")
        self.world = World(self.spec, places=8)
        self.world.user(PagedKVCache(self.spec, KVCacheShape(KVCacheLayout.NHD, 16, 16)))
        self.transport, self.theirs = LoopbackTransport(), LoopbackTransport()
        self.pulls = EntryPulls(self.world.tiers, self.transport, self.world.clock)
        flows = list(entry_links(self.spec, owner=owner, reader=NodeRanks(1)).values())
        self.links = tuple(EntryLink(peer, each) for peer, each in zip(self.LINKS, flows, strict=True))
        for link in self.LINKS:
            ours, theirs = self.transport.listen(link), self.theirs.listen(link)
            self.transport.connect(link, theirs)
            self.theirs.connect(link, ours)
        self.layouts = [layout_of(self.spec, rank, 2) for rank in range(2)]
        begun: Future[int] = Future()
        self.pulls.receiver.begin(PullJob(7, KEYS), self.links, begun)
        assert begun.result() == len(KEYS)

    def message(self, rank: int) -> Tensor:
        each = cut_for(self.layouts[rank], self.links[rank].flows)
        message = torch.zeros(each.message_bytes, dtype=torch.uint8)
        assert cut(each, KEY, an_entry(self.layouts[rank], self.spec, rank, 2), message)
        return message

    def send(self, rank: int, message: Tensor, index: int = 0) -> None:
        self.theirs.send(self.LINKS[rank], 7 << INDEX_BITS | index, message)
        self.run()

    def run(self) -> None:
        for _ in range(10):
            self.transport.progress()
            while (arrival := self.transport.probe()) is not None:
                self.pulls.receiver.arrived(arrival)
            self.pulls.step()

    def end(self, first: int) -> "Future[int]":
        ended: Future[int] = Future()
        self.pulls.receiver.end(7, first, 0.0, ended)
        self.run()
        self.world.check_nothing_is_left()
        assert not self.pulls.receiver.pulls
        return ended

    @property
    def damaged(self) -> int:
        return self.world.tiers.counters().damaged


def test_an_entry_is_kept_once_the_pieces_of_both_ranks_are_there() -> None:
    reader = Reader()
    reader.send(1, reader.message(1))
    assert reader.world.tiers.count(KEYS) == 0
    reader.send(0, reader.message(0))
    assert reader.world.tiers.count(KEYS) == 1
    assert reader.end(1).result() == 1


@pytest.mark.parametrize("wrong", ["twice", "too long", "damaged", "by the other rank", "as an entry"])
def test_a_rank_that_sends_anything_else_makes_no_entry(wrong: str) -> None:
    reader = Reader()
    message = reader.message(0)
    match wrong:
        case "twice":
            reader.send(0, message)
        case "too long":
            message = torch.cat([message, message[:64]])
        case "damaged":
            message[5] ^= 1
        case "by the other rank":
            message = reader.message(1)
        case "as an entry":
            message = an_entry(reader.world.layout, reader.spec, 0, 1)
    reader.send(0, message)
    if wrong != "twice":
        reader.send(1, reader.message(1))
    assert reader.damaged == (wrong in ("damaged", "by the other rank"))
    assert reader.end(0).result() == 0
    assert reader.world.tiers.count(KEYS) == 0


def test_a_reader_holds_only_so_many_bytes_of_pieces_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_receiver, "_JOINING_BYTES", 0)
    monkeypatch.setattr(pull_receiver, "IN_FLIGHT", 0)
    reader = Reader()
    for rank in range(2):
        reader.send(rank, reader.message(rank))
    assert reader.end(0).result() == 0


def test_two_ranks_that_send_all_of_an_entry_at_once_bring_it_once() -> None:
    reader = Reader(own_requests=True)
    whole = layout_of(reader.spec, 0, 1)
    each = cut_for(whole, reader.links[0].flows)
    message = torch.zeros(each.message_bytes, dtype=torch.uint8)
    assert cut(each, KEY, an_entry(whole, reader.spec, 0, 1), message)
    for link in Reader.LINKS:
        reader.theirs.send(link, 7 << INDEX_BITS, message.clone())
    reader.run()
    assert reader.world.tiers.count(KEYS) == 1
    assert reader.end(1).result() == 1


@pytest.mark.parametrize("lost_after", [0, 1])
def test_a_rank_whose_link_breaks_leaves_nothing_of_the_others_pieces(lost_after: int) -> None:
    reader = Reader()
    for rank in range(lost_after):
        reader.send(rank, reader.message(rank))
    reader.pulls.lost(reader.LINKS[1])
    reader.transport.disconnect(reader.LINKS[1])
    reader.run()
    assert not reader.pulls.holds(reader.LINKS[1])
    assert reader.end(len(KEYS)).result() == 0


def test_a_digest_reads_a_piece_that_begins_anywhere() -> None:
    payload = torch.arange(10_000, dtype=torch.int64).view(torch.uint8)
    shifted = torch.cat([torch.zeros(64, dtype=torch.uint8), payload])[64:]
    assert digest(shifted) == digest(payload)
