"""What a node remembers of a store that other processes fill and empty."""

from kvtransfer.stores.known_digests import KnownDigests
from tests.unit.kvtransfer.stores.entries import entry_keys


def test_what_was_seen_is_known_until_it_is_missed() -> None:
    known, keys = KnownDigests(), entry_keys(3)
    known.seen(keys)
    known.missed(keys[2:])
    assert [key.block.digest in known for key in keys] == [True, True, False]
    assert (known.take_lost(), known.take_lost()) == ([keys[2].block.digest], [])
    known.missed(keys[2:])
    assert known.take_lost() == []


def test_beyond_its_bound_the_oldest_are_forgotten() -> None:
    known, keys = KnownDigests(most=2), entry_keys(3)
    known.seen(keys[:2])
    known.seen(keys[:1])  # used again
    known.seen(keys[2:])
    assert known.take_lost() == [keys[1].block.digest]
    assert [key.block.digest in known for key in keys] == [True, False, True]


def test_a_dropped_root_is_forgotten_and_no_other() -> None:
    known = KnownDigests()
    mine, others = entry_keys(2), entry_keys(2, salt="others")
    known.seen((*mine, *others))
    known.drop_roots(frozenset({mine[0].root}))
    assert set(known.take_lost()) == {key.block.digest for key in mine}
    assert all(key.block.digest in known for key in others)
