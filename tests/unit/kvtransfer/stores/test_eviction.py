"""Which entry leaves a full store."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtransfer.stores.eviction import GreedyDual, RefusedKeys

ROOT = b"root"


def chain(order: GreedyDual, *names: bytes, cost: float = 1.0) -> None:
    for parent, name in zip((ROOT, *names), names, strict=False):
        order.add(name, cost, parent)


def drained(order: GreedyDual) -> list[bytes]:
    found = []
    while (key := order.evict()) is not None:
        found.append(key)
    return found


def test_an_empty_order_has_nobody_to_leave() -> None:
    assert GreedyDual().evict() is None


def test_a_sequence_leaves_from_its_end() -> None:
    order = GreedyDual()
    chain(order, b"a", b"b", b"c")
    assert drained(order) == [b"c", b"b", b"a"]


def test_a_prefix_stays_while_any_of_its_continuations_does() -> None:
    order = GreedyDual()
    chain(order, b"a", b"b")
    order.add(b"c", 9.0, b"a")
    assert drained(order) == [b"b", b"c", b"a"]


def test_the_cheapest_to_compute_leaves_first() -> None:
    order = GreedyDual()
    for name, cost in ((b"x", 3.0), (b"y", 1.0), (b"z", 2.0)):
        order.add(name, cost, ROOT)
    assert drained(order) == [b"y", b"z", b"x"]


def test_of_equal_entries_the_one_used_longest_ago_leaves_first() -> None:
    order = GreedyDual()
    for name in (b"x", b"y", b"z"):
        order.add(name, 1.0, ROOT)
    order.touch(b"x")
    assert drained(order) == [b"y", b"z", b"x"]


def test_a_dear_entry_that_nobody_uses_leaves_at_last() -> None:
    order = GreedyDual()
    order.add(b"dear", 3.0, ROOT)
    left = []
    for number in range(10):
        order.add(b"%d" % number, 1.0, ROOT)
        left.append(order.evict())
    # Each of the others is worth one more than the one before it, and the third as much as this one.
    assert left[:4] == [b"0", b"1", b"dear", b"2"]


def test_a_cheap_entry_that_leaves_late_makes_new_ones_worth_no_less() -> None:
    order = GreedyDual()
    order.add(b"old", 9.5, ROOT)
    order.add(b"cheap", 1.0, ROOT)
    order.add(b"dear", 9.0, b"cheap")
    assert [order.evict(), order.evict()] == [b"dear", b"cheap"]
    order.add(b"new", 1.0, ROOT)
    assert drained(order) == [b"old", b"new"]


def test_a_pinned_entry_and_those_before_it_never_leave() -> None:
    order = GreedyDual()
    chain(order, b"a", b"b", b"c")
    order.pin(b"b")
    assert drained(order) == [b"c"]
    order.unpin(b"b")
    assert drained(order) == [b"b", b"a"]


def test_an_entry_may_come_before_its_parent() -> None:
    order = GreedyDual()
    order.add(b"b", 1.0, b"a")
    order.add(b"a", 1.0, ROOT)
    assert drained(order) == [b"b", b"a"]


def test_an_entry_that_is_removed_frees_its_parent() -> None:
    order = GreedyDual()
    chain(order, b"a", b"b")
    order.remove(b"b")
    assert drained(order) == [b"a"]


def test_memory_does_not_grow_with_uses() -> None:
    order = GreedyDual()
    chain(order, b"a", b"b")
    for _ in range(10_000):
        order.touch(b"b")
        order.pin(b"b")
        order.unpin(b"b")
    assert len(order._heap) < 100


def test_only_the_latest_refusals_are_remembered() -> None:
    refused = RefusedKeys()
    for number in range(5000):
        refused.add(b"%d" % number)
    refused.discard(b"4998")
    refused.discard(b"never refused")
    assert [b"%d" % number in refused for number in (0, 4997, 4998, 4999)] == [False, True, False, True]


@dataclass
class Row:
    cost: float
    parent: bytes
    value: float
    used: int
    is_pinned: bool = False


@dataclass
class Reference:
    """The same order, by a look at every entry."""

    rows: dict[bytes, Row] = field(default_factory=dict)
    inflation: float = 0.0
    uses: int = 0

    def use(self, key: bytes) -> None:
        self.uses += 1
        row = self.rows[key]
        row.value, row.used = self.inflation + row.cost, self.uses

    def evict(self) -> bytes | None:
        followed = {row.parent for row in self.rows.values()}
        free = [key for key, row in self.rows.items() if not row.is_pinned and key not in followed]
        if not free:
            return None
        key = min(free, key=lambda each: (self.rows[each].value, self.rows[each].used))
        self.inflation = max(self.inflation, self.rows.pop(key).value)
        return key


class OrderMachine(RuleBasedStateMachine):
    """Entries of a small tree, in which the parent of each number is half of it."""

    def __init__(self) -> None:
        super().__init__()
        self.order = GreedyDual()
        self.reference = Reference()

    @rule(number=st.integers(1, 40), cost=st.sampled_from([0.5, 1.0, 1.0, 3.0]))
    def add(self, number: int, cost: float) -> None:
        key, parent = b"%d" % number, b"%d" % (number // 2)
        if key not in self.reference.rows:
            self.order.add(key, cost, parent)
            self.reference.rows[key] = Row(cost, parent, 0.0, 0)
            self.reference.use(key)

    @precondition(lambda self: self.reference.rows)
    @rule(data=st.data(), what=st.sampled_from(["touch", "touch", "pin", "unpin", "remove"]))
    def change(self, data: st.DataObject, what: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.reference.rows)))
        getattr(self.order, what)(key)
        match what:
            case "touch":
                self.reference.use(key)
            case "remove":
                del self.reference.rows[key]
            case _:
                self.reference.rows[key].is_pinned = what == "pin"

    @rule()
    def evict(self) -> None:
        assert self.order.evict() == self.reference.evict()

    @invariant()
    def has_the_same_entries(self) -> None:
        assert len(self.order) == len(self.reference.rows)
        assert all(key in self.order for key in self.reference.rows)


TestOrder = OrderMachine.TestCase
TestOrder.settings = settings(max_examples=60)
