"""The earliest deadline is found, whatever deadlines were set, replaced and removed before."""

from hypothesis import given
from hypothesis import strategies as st

from decode_node.task_times import Deadlines

CHANGES = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.none() | st.integers(0, 20)), max_size=300)


@given(CHANGES, st.integers(0, 20))
def test_first_and_due_agree_with_a_plain_table(changes: list[tuple[str, int | None]], now_s: int) -> None:
    deadlines = Deadlines()
    table: dict[str, int] = {}
    for engine_id, deadline_s in changes:
        deadlines.set(engine_id, deadline_s)
        table.pop(engine_id, None)
        if deadline_s is not None:
            table[engine_id] = deadline_s
        assert deadlines.first_s == min(table.values(), default=None)
    due = deadlines.due(now_s)
    assert sorted(due) == sorted(name for name, deadline_s in table.items() if deadline_s <= now_s)
    assert [table[name] for name in due] == sorted(table[name] for name in due)


def test_replaced_deadlines_leave_no_entries() -> None:
    deadlines = Deadlines()
    for deadline_s in range(10_000, 0, -1):
        deadlines.set("a", float(deadline_s))
        deadlines.set("b", 20_000.0 - deadline_s)
    assert len(deadlines._heap) < 200
    assert deadlines.first_s == 1.0
