"""The slots of a staging pool: their memory, and the order in which they are handed out."""

import torch

from kvtransfer.staging import Pools, StagingPool


def test_slots_are_equal_apart_and_aligned() -> None:
    pool = StagingPool(slot_bytes=5000, slots=3, device=torch.device("cpu"))
    slots = [pool.take() for _ in range(3)]
    for value, slot in enumerate(slots):
        assert slot is not None
        assert slot.memory.shape == (5000,)
        assert slot.memory.data_ptr() % 4096 == 0
        slot.memory.fill_(value)
    assert [int(slot.memory.sum()) for slot in slots if slot is not None] == [0, 5000, 10000]


def test_a_slot_shows_one_memory_as_tensors_and_as_bytes() -> None:
    (slot,) = StagingPool(slot_bytes=10, slots=1, device=torch.device("cpu")).members
    slot.bytes[2:5] = b"abc"
    assert slot.message(5).tolist() == [0, 0, *b"abc"]
    slot.message(3)[0] = 7
    assert bytes(slot.bytes[:3]) == b"\x07\x00a"
    # A transport keeps state for each tensor object.
    assert slot.message(5) is slot.message(5)


def test_an_empty_pool_gives_none_until_a_slot_comes_back() -> None:
    pool = StagingPool(slot_bytes=10, slots=2, device=torch.device("cpu"))
    first, second = pool.take(), pool.take()
    assert first is not None
    assert second is not None
    assert (pool.take(), pool.available) == (None, 0)
    pool.give_back(first)
    assert pool.take() is first


def test_slots_are_handed_out_in_turn() -> None:
    pool = StagingPool(slot_bytes=10, slots=3, device=torch.device("cpu"))
    seen = []
    for _ in range(6):
        slot = pool.take()
        assert slot is not None
        seen.append(slot.index)
        pool.give_back(slot)
    assert seen == [0, 1, 2, 0, 1, 2]


def test_pools_are_made_when_needed_and_have_room_while_one_of_them_has() -> None:
    made = []

    def make(name: str) -> StagingPool:
        made.append(name)
        return StagingPool(slot_bytes=10, slots=1, device=torch.device("cpu"))

    pools = Pools(direct=lambda: make("direct"), in_host=lambda: make("in host"))
    assert pools.may_have_room
    direct = pools.of(through_host=False)
    assert pools.of(through_host=False) is direct
    assert made == ["direct"]
    slot = direct.take()
    assert not pools.may_have_room
    in_host = pools.of(through_host=True)
    assert in_host is not direct
    assert pools.may_have_room
    in_host.take()
    assert not pools.may_have_room
    assert slot is not None
    direct.give_back(slot)
    assert pools.may_have_room
    assert made == ["direct", "in host"]
