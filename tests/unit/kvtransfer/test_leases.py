"""The lease table: which segments may be scattered, and when blocks may be freed. I1 to I3, by example and by model."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.errors import InternalError, UnknownLease
from baton.kvcache.spec import KVCacheSpec, KVKind
from kvtransfer.leases import LeaseGrant, LeaseTable
from kvtransfer.parts import parts_of
from kvtransfer.refusals import SegmentRefusal
from kvtransfer.segments import Segment, Tag, payload_bytes

SPEC = KVCacheSpec(KVKind.GQA, num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32")
OURS = 0xABCDEF
HEADS = range(SPEC.num_kv_heads)


def segment(
    lease: int,
    number: int,
    *,
    layers: tuple[int, int] = (0, 2),
    tokens: tuple[int, int] = (0, 8),
    heads: tuple[int, int] = (0, 2),
    incarnation: int = OURS,
) -> Segment:
    size = payload_bytes(SPEC, layers=layers[1] - layers[0], tokens=tokens[1] - tokens[0], heads=heads[1] - heads[0])
    return Segment(incarnation, lease, number, *layers, *tokens, *heads, size)


def table_with(*grants: LeaseGrant) -> LeaseTable:
    table = LeaseTable(parts_of(SPEC, (HEADS,)), incarnation=OURS)
    for grant in grants:
        table.open(grant)
    return table


LEASE = LeaseGrant(4, (0, 1), 0, 8)
STATE = KVCacheSpec(KVKind.STATE, num_layers=3, num_kv_heads=4, head_dim=5, dtype="float32")
INDEX = KVCacheSpec(KVKind.MLA, num_layers=2, num_kv_heads=1, head_dim=3, dtype="float32")
WHOLE = replace(SPEC, index=INDEX, state=STATE)


def of_part(number: int, part: int, *, layers: range, tokens: tuple[int, int], heads: tuple[int, int]) -> Segment:
    spec = WHOLE.parts[part]
    size = payload_bytes(spec, layers=len(layers), tokens=tokens[1] - tokens[0], heads=heads[1] - heads[0])
    return Segment(OURS, 4, number, layers.start, layers.stop, *tokens, *heads, size)


def test_a_lease_is_filled_by_kv_index_and_one_state() -> None:
    table = LeaseTable(parts_of(WHOLE), incarnation=OURS)
    table.open(replace(LEASE, token_start=3, state_slot=1))
    parts = [
        of_part(0, 0, layers=range(2), tokens=(3, 8), heads=(0, 2)),
        of_part(1, 1, layers=range(2, 4), tokens=(3, 8), heads=(0, 1)),
        of_part(2, 2, layers=range(4, 7), tokens=(7, 8), heads=(0, 3)),
        of_part(3, 2, layers=range(4, 7), tokens=(7, 8), heads=(3, 4)),
    ]
    for part in parts:
        assert table.start_scatter(Tag(1, 4, part.number), part) is None
        done = table.finish_scatter(part, 0.0)
        assert (done.filled is not None) == (part is parts[-1])
    assert done.filled is not None
    assert done.filled.bytes == 5 * WHOLE.bytes_per_token + WHOLE.bytes_per_slot


@pytest.mark.parametrize(
    "wrong",
    [
        of_part(0, 2, layers=range(4, 7), tokens=(6, 7), heads=(0, 4)),  # a state of fewer tokens
        of_part(0, 2, layers=range(4, 7), tokens=(6, 8), heads=(0, 4)),
        of_part(0, 2, layers=range(4, 8), tokens=(7, 8), heads=(0, 4)),
        of_part(0, 1, layers=range(2, 5), tokens=(0, 8), heads=(0, 1)),  # more than one part
        of_part(0, 0, layers=range(1, 3), tokens=(0, 8), heads=(0, 1)),
        of_part(0, 1, layers=range(2, 4), tokens=(0, 8), heads=(0, 2)),
    ],
)
def test_a_segment_lies_in_one_part_and_has_the_states_one_token(wrong: Segment) -> None:
    table = LeaseTable(parts_of(WHOLE), incarnation=OURS)
    table.open(replace(LEASE, state_slot=1))
    assert table.start_scatter(Tag(1, 4, 0), wrong) is SegmentRefusal.OUT_OF_RANGE


def test_a_state_is_taken_once() -> None:
    table = LeaseTable(parts_of(WHOLE), incarnation=OURS)
    table.open(replace(LEASE, state_slot=1))
    once, again = (of_part(number, 2, layers=range(4, 7), tokens=(7, 8), heads=(0, 4)) for number in range(2))
    assert table.start_scatter(Tag(1, 4, 0), once) is None
    assert table.start_scatter(Tag(1, 4, 1), again) is SegmentRefusal.OVERLAP


@pytest.mark.parametrize("has_draft", [True, False])
def test_a_lease_is_filled_without_the_draft_kv_that_its_sender_does_not_have(has_draft: bool) -> None:
    spec = replace(SPEC, draft=replace(SPEC, num_layers=1))
    table = LeaseTable(parts_of(spec), incarnation=OURS)
    table.open(LEASE)
    kv = segment(4, 0, tokens=(0, 5)), segment(4, 1, tokens=(5, 8))
    draft = segment(4, 2, layers=(2, 3))
    for each in kv:
        assert table.start_scatter(Tag(1, 4, each.number), each, has_draft=has_draft) is None
        done = table.finish_scatter(each, 0.0)
    assert (done.filled is not None) is not has_draft
    refusal = table.start_scatter(Tag(1, 4, 2), draft, has_draft=has_draft)
    assert refusal is (None if has_draft else SegmentRefusal.OUT_OF_RANGE)
    if has_draft:
        assert table.finish_scatter(draft, 0.0).filled is not None


def test_a_lease_without_tokens_wants_no_state() -> None:
    table = LeaseTable(parts_of(WHOLE), incarnation=OURS)
    assert table.open(LeaseGrant(4, (0,), 8, 8, state_slot=1)) is not None


def test_a_lease_is_filled_when_every_layer_token_and_head_has_come_once() -> None:
    table = table_with(LEASE)
    parts = [
        segment(4, 0, layers=(0, 1)),
        segment(4, 1, layers=(1, 2), tokens=(0, 3)),
        segment(4, 2, layers=(1, 2), tokens=(3, 8), heads=(1, 2)),
        segment(4, 3, layers=(1, 2), tokens=(3, 8), heads=(0, 1)),
    ]
    for part in parts:
        assert table.arrival(Tag(1, 4, part.number), 10.0 + part.number) is None
        assert table.start_scatter(Tag(1, 4, part.number), part) is None
        done = table.finish_scatter(part, 20.0 + part.number)
        assert (done.filled is not None) == (part is parts[-1])
    assert done.filled is not None
    assert (done.filled.bytes, done.filled.segments, done.filled.seconds) == (8 * SPEC.bytes_per_token, 4, 13.0)


def test_a_lease_is_filled_by_the_tokens_that_will_be_read_and_takes_no_others() -> None:
    table = LeaseTable(parts_of(replace(SPEC, windows=(3, 0)), (HEADS,)), incarnation=OURS)
    table.open(LeaseGrant(4, (0, 1), 0, 8, resume_at=7))  # of layer 0 tokens from 5 on
    parts = [segment(4, 0, layers=(1, 2), tokens=(0, 5)), segment(4, 1, tokens=(5, 8))]
    for part in parts:
        assert table.arrival(Tag(1, 4, part.number), 0.0) is None
    early = segment(4, 0, tokens=(4, 8))
    assert table.start_scatter(Tag(1, 4, 0), early) is SegmentRefusal.OUT_OF_RANGE
    for part in parts:
        assert table.start_scatter(Tag(1, 4, part.number), part) is None
        filled = table.finish_scatter(part, 1.0).filled
    assert filled is not None
    assert filled.bytes == (5 + 2 * 3) * SPEC.bytes_per_token_layer


def test_of_a_model_that_several_ranks_hold_only_this_ones_heads_are_taken() -> None:
    table = LeaseTable(parts_of(SPEC, (range(4, 6),)), incarnation=OURS)
    table.open(LEASE)
    for number, heads in enumerate([(3, 5), (5, 7), (0, 2)]):
        assert table.arrival(Tag(1, 4, number), 0.0) is None
        assert table.start_scatter(Tag(1, 4, number), segment(4, number, heads=heads)) is SegmentRefusal.OUT_OF_RANGE
    ours = segment(4, 3, heads=(4, 6))
    assert table.arrival(Tag(1, 4, 3), 0.0) is None
    assert table.start_scatter(Tag(1, 4, 3), ours) is None
    assert table.finish_scatter(ours, 1.0).filled is not None


@pytest.mark.parametrize("step", [0, 2])
def test_a_step_between_layers_that_leaves_some_out_does_not_fill_a_lease(step: int) -> None:
    table = table_with(LEASE)
    part = replace(segment(4, 0), layer_step=step)
    assert table.arrival(Tag(1, 4, 0), 0.0) is None
    refusal = table.start_scatter(Tag(1, 4, 0), part)
    assert refusal is (SegmentRefusal.OUT_OF_RANGE if step == 0 else SegmentRefusal.WRONG_SIZE)


def test_a_lease_without_tokens_is_filled_at_once() -> None:
    table = table_with()
    totals = table.open(LeaseGrant(0, (), 16, 16))
    assert totals is not None
    assert (totals.bytes, totals.segments, totals.seconds) == (0, 0, 0.0)
    assert table.close(0) == totals


def test_closing_waits_for_the_scatter_that_runs() -> None:
    table = table_with(LEASE)
    one, other = segment(4, 0, tokens=(0, 4)), segment(4, 1, tokens=(4, 8))
    for part in (one, other):
        assert table.arrival(Tag(1, 4, part.number), 0.0) is None
    assert table.start_scatter(Tag(1, 4, 0), one) is None
    assert table.close(4) is None
    assert table.start_scatter(Tag(1, 4, 1), other) is SegmentRefusal.LATE
    done = table.finish_scatter(one, 1.0)
    assert done.filled is None
    assert done.closed is not None
    assert done.closed.segments == 1


@pytest.mark.parametrize(
    ("tag", "refusal"),
    [
        (Tag(1, 5, 0), SegmentRefusal.UNKNOWN_LEASE),
        (Tag(1, 3, 0), SegmentRefusal.LATE),
        (Tag(2, 4, 1), SegmentRefusal.FOREIGN_SENDER),
        (Tag(1, 4, 0), SegmentRefusal.DUPLICATE),
    ],
)
def test_an_impossible_tag_gets_no_memory(tag: Tag, refusal: SegmentRefusal) -> None:
    table = table_with(LeaseGrant(3, (0,), 0, 4), LEASE)
    table.close(3)
    assert table.arrival(Tag(1, 4, 0), 0.0) is None
    assert table.start_scatter(Tag(1, 4, 0), segment(4, 0, tokens=(0, 4))) is None
    assert table.arrival(tag, 0.0) is refusal


@pytest.mark.parametrize(
    ("wrong", "refusal"),
    [
        (segment(4, 0, incarnation=OURS + 1), SegmentRefusal.STALE_INCARNATION),
        (segment(5, 0), SegmentRefusal.MISLABELLED),
        (segment(4, 1), SegmentRefusal.MISLABELLED),
        (segment(4, 0, tokens=(0, 9)), SegmentRefusal.OUT_OF_RANGE),
        (segment(4, 0, layers=(1, 3)), SegmentRefusal.OUT_OF_RANGE),
        (segment(4, 0, heads=(0, 3)), SegmentRefusal.OUT_OF_RANGE),
        (segment(4, 0, tokens=(5, 5)), SegmentRefusal.OUT_OF_RANGE),
        (replace(segment(4, 0), payload_bytes=8), SegmentRefusal.WRONG_SIZE),
        (segment(4, 0, tokens=(2, 3)), SegmentRefusal.OVERLAP),
    ],
)
def test_an_impossible_trailer_is_not_scattered(wrong: Segment, refusal: SegmentRefusal) -> None:
    table = table_with(LEASE, LeaseGrant(5, (0,), 0, 8))
    before = segment(4, 9, tokens=(2, 3))
    assert table.arrival(Tag(1, 4, 9), 0.0) is None
    assert table.start_scatter(Tag(1, 4, 9), before) is None
    assert table.arrival(Tag(1, 4, 0), 0.0) is None
    assert table.start_scatter(Tag(1, 4, 0), wrong) is refusal


def test_a_message_that_was_not_scattered_claims_nothing() -> None:
    """A message from an unauthenticated peer may carry any tag: the lease's own sender comes after it."""
    table = table_with(LEASE)
    for sender in (1, 2):
        assert table.arrival(Tag(sender, 4, 0), 0.0) is None
    assert table.start_scatter(Tag(2, 4, 0), segment(4, 0)) is None
    assert table.bound_to(2) == (4,)


def test_a_number_is_never_used_again() -> None:
    table = table_with(LEASE)
    table.close(4)
    with pytest.raises(InternalError, match="lease 4"):
        table.open(LEASE)


def test_closing_a_lease_that_is_not_open_is_an_error() -> None:
    table = table_with(LEASE)
    table.close(4)
    for number in (4, 5):
        with pytest.raises(UnknownLease):
            table.close(number)


def test_a_lost_peer_leaves_the_leases_that_it_had_begun_to_fill() -> None:
    table = table_with(LeaseGrant(1, (0,), 0, 4), LeaseGrant(2, (0,), 0, 4), LeaseGrant(3, (0,), 0, 4))
    for sender, lease in ((7, 1), (8, 2), (7, 3)):
        assert table.start_scatter(Tag(sender, lease, 0), segment(lease, 0, tokens=(0, 2))) is None
    assert table.close(3) is None
    assert table.bound_to(7) == (1,)


def test_the_ranks_of_one_node_fill_a_lease_together_and_those_of_two_nodes_do_not() -> None:
    """Each rank numbers its segments on its own."""
    table = table_with(LEASE)
    node, other = 10, 12
    halves = segment(4, 0, heads=(0, 1)), segment(4, 0, heads=(1, 2))
    for sender in (10, 11):
        assert table.arrival(Tag(sender, 4, 0), 0.0, group=node) is None
    assert table.arrival(Tag(12, 4, 1), 0.0, group=other) is None  # nothing is scattered yet
    for sender, half in zip((10, 11), halves, strict=True):
        assert table.start_scatter(Tag(sender, 4, 0), half, group=node) is None
    assert table.start_scatter(Tag(12, 4, 1), segment(4, 1), group=other) is SegmentRefusal.FOREIGN_SENDER
    assert table.arrival(Tag(11, 4, 0), 0.0, group=node) is SegmentRefusal.DUPLICATE
    assert table.start_scatter(Tag(11, 4, 0), halves[1], group=node) is SegmentRefusal.DUPLICATE
    assert table.arrival(Tag(12, 4, 1), 0.0, group=other) is SegmentRefusal.FOREIGN_SENDER
    assert table.finish_scatter(halves[0], 1.0).filled is None
    assert table.finish_scatter(halves[1], 2.0).filled is not None
    assert table.bound_to(node) == (4,)
    assert table.bound_to(other) == ()


@pytest.mark.parametrize("values", [(-1, (), 0, 0), (2**63, (), 0, 0), (0, (), 3, 2), (0, (), -1, 2)])
def test_an_impossible_grant_is_an_error(values: tuple[int, tuple[int, ...], int, int]) -> None:
    with pytest.raises(InternalError):
        LeaseGrant(*values)


class LeaseMachine(RuleBasedStateMachine):
    """Honest and wrong senders against the table; a model of the blocks says what may happen.

    Each lease holds its own block. `owner` says which lease a block is held by: the model frees it when, and only
    when, the table says so, and gives it to a later lease. I3: a scatter only ever writes to the block of a lease that
    holds it, each cell at most once. I2: a lease is filled exactly when all its cells were written under its number.
    """

    TOKENS = 4

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(parts_of(SPEC, (HEADS,)), incarnation=OURS)
        self.next_number = 0
        self.next_segment = 100  # apart from the numbers of `arrive_anything`
        self.owner: dict[int, int] = {}  # block -> lease
        self.block_of: dict[int, int] = {}
        self.received: list[tuple[Tag, Segment]] = []
        self.running: list[Segment] = []
        self.written: dict[int, set[tuple[int, int, int]]] = {}
        self.filled: set[int] = set()
        self.closing: set[int] = set()
        self.now_s = 0.0

    def _clock(self) -> float:
        self.now_s += 1.0
        return self.now_s

    @precondition(lambda self: len(self.owner) < 3)
    @rule(tokens=st.integers(0, TOKENS))
    def open(self, tokens: int) -> None:
        number = self.next_number
        self.next_number += 1
        block = min(set(range(3)) - set(self.owner))
        self.owner[block] = number
        self.block_of[number] = block
        self.written[number] = set()
        totals = self.table.open(LeaseGrant(number, (block,), 0, tokens))
        assert (totals is not None) == (tokens == 0)
        if totals is not None:
            self.filled.add(number)

    @precondition(lambda self: set(self.block_of) - self.closing)
    @rule(
        data=st.data(),
        layers=st.sampled_from([(0, 1), (1, 2), (0, 2)]),
        tokens=st.sampled_from([(0, 2), (2, 4), (0, 4), (1, 3)]),
        heads=st.sampled_from([(0, 1), (1, 2), (0, 2)]),
        incarnation=st.sampled_from([OURS, OURS, OURS + 1]),
    )
    def arrive_for_an_open_lease(
        self,
        data: st.DataObject,
        layers: tuple[int, int],
        tokens: tuple[int, int],
        heads: tuple[int, int],
        incarnation: int,
    ) -> None:
        """A new segment, perhaps stale or of tokens that have arrived before."""
        lease = data.draw(st.sampled_from(sorted(set(self.block_of) - self.closing)))
        self.next_segment += 1
        tag = Tag(1 + lease % 2, lease, self.next_segment)
        refusal = self.table.arrival(tag, self._clock())
        assert refusal in (None, SegmentRefusal.FOREIGN_SENDER)
        if refusal is None:
            self.received.append(
                (tag, segment(lease, tag.number, layers=layers, tokens=tokens, heads=heads, incarnation=incarnation))
            )

    @rule(
        sender=st.integers(1, 2),
        lease=st.integers(0, 8),
        number=st.integers(0, 5),
        layers=st.sampled_from([(0, 1), (1, 2), (0, 2)]),
        tokens=st.sampled_from([(0, 2), (2, 4), (0, 4), (1, 3), (0, 1), (4, 6)]),
        heads=st.sampled_from([(0, 1), (1, 2), (0, 2)]),
        incarnation=st.sampled_from([OURS, OURS, OURS, OURS + 1]),
        trailer_lease=st.none() | st.integers(0, 8),
    )
    def arrive_anything(
        self,
        sender: int,
        lease: int,
        number: int,
        layers: tuple[int, int],
        tokens: tuple[int, int],
        heads: tuple[int, int],
        incarnation: int,
        trailer_lease: int | None,
    ) -> None:
        """Any message at all: right, repeated, foreign, late, stale, mislabelled, too long."""
        tag = Tag(sender, lease, number)
        named = lease if trailer_lease is None else trailer_lease
        refusal = self.table.arrival(tag, self._clock())
        if refusal is None:
            assert lease in self.block_of
            assert lease not in self.closing
            self.received.append(
                (tag, segment(named, number, layers=layers, tokens=tokens, heads=heads, incarnation=incarnation))
            )
        elif lease >= self.next_number:
            assert refusal is SegmentRefusal.UNKNOWN_LEASE
        elif lease not in self.block_of or lease in self.closing:
            assert refusal is SegmentRefusal.LATE

    @precondition(lambda self: self.received)
    @rule(data=st.data())
    def start_scatter(self, data: st.DataObject) -> None:
        tag, arrived = self.received.pop(data.draw(st.integers(0, len(self.received) - 1)))
        refusal = self.table.start_scatter(tag, arrived)
        if refusal is not None:
            return
        assert arrived.incarnation == OURS
        assert arrived.lease == tag.lease
        assert self.owner[self.block_of[arrived.lease]] == arrived.lease
        assert arrived.lease not in self.closing
        cells = self._cells(arrived)
        claimed = self.written[arrived.lease].union(
            *(self._cells(other) for other in self.running if other.lease == arrived.lease)
        )
        assert not cells & claimed
        self.running.append(arrived)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish_scatter(self, data: st.DataObject) -> None:
        scattered = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        assert self.owner[self.block_of[scattered.lease]] == scattered.lease
        self.written[scattered.lease] |= self._cells(scattered)
        done = self.table.finish_scatter(scattered, self._clock())
        if done.filled is not None:
            assert done.filled.number not in self.filled
            self.filled.add(done.filled.number)
        if done.closed is not None:
            self._free(done.closed.number)

    @precondition(lambda self: set(self.block_of) - self.closing)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(set(self.block_of) - self.closing)))
        if self.table.close(number) is not None:
            self._free(number)
        else:
            self.closing.add(number)

    @precondition(lambda self: {scatter.lease for scatter in self.running} - self.closing)
    @rule()
    def close_while_a_scatter_runs(self) -> None:
        number = min({scatter.lease for scatter in self.running} - self.closing)
        assert self.table.close(number) is None
        self.closing.add(number)

    @rule(sender=st.integers(1, 2))
    def lose_peer(self, sender: int) -> None:
        """The peer's receives are cancelled at any point; the node closes its leases."""
        self.received = [item for item in self.received if item[0].sender != sender]
        for number in self.table.bound_to(sender):
            if self.table.close(number) is not None:
                self._free(number)
            else:
                self.closing.add(number)
        assert self.table.bound_to(sender) == ()

    def _free(self, number: int) -> None:
        assert all(scatter.lease != number for scatter in self.running)
        del self.owner[self.block_of.pop(number)]
        self.closing.discard(number)

    def _cells(self, box: Segment) -> set[tuple[int, int, int]]:
        return {
            (layer, token, head)
            for layer in box.layers
            for token in range(box.token_start, box.token_stop)
            for head in box.heads
        }

    @invariant()
    def the_table_holds_exactly_the_leases_that_hold_blocks(self) -> None:
        assert self.table.open_leases == len(self.block_of) == len(self.owner)

    @invariant()
    def closing_leases_are_those_with_a_scatter_running(self) -> None:
        assert all(any(scatter.lease == number for scatter in self.running) for number in self.closing)


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
