"""Searches and drops of one rank's entries, while they wait for the answers of the stores below host memory. Pure."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from baton.core.errors import DeadlineExceeded
from baton.core.kv_entries import DroppedEntries, EntryKey
from kvtransfer.offload_queue import StoreQueue
from kvtransfer.stores.host_memory import HostMemory

HOST = "host"

# A search ends without a store that takes longer.
FIND_LIMIT_S = 0.5
# A drop fails if a store takes longer.
DROP_LIMIT_S = 10.0


@dataclass(eq=False)
class _Find:
    keys: tuple[EntryKey, ...]
    future: Future[int]
    end_s: float
    found: int
    answer: Future[int]
    others: list[StoreQueue]


@dataclass(eq=False)
class _FindFirst:
    keys: tuple[EntryKey, ...]
    future: Future[int]
    end_s: float
    answers: list[Future[int]]


@dataclass(eq=False)
class _Drop:
    future: Future[None]
    end_s: float
    answers: dict[str, Future[None]]


@dataclass(eq=False)
class _DropOfRoots:
    future: Future[DroppedEntries]
    end_s: float
    from_host: int
    answers: dict[str, Future[int | None]]


class StoreCalls:
    """The calls that have not ended.

    Args:
        stores: in the order in which they are asked.
        clock: monotonic seconds.
    """

    def __init__(self, host: HostMemory, stores: Sequence[StoreQueue], clock: Callable[[], float]) -> None:
        self._host = host
        self._stores = stores
        self._clock = clock
        self._finds: list[_Find] = []
        self._firsts: list[_FindFirst] = []
        self._drops: list[_Drop | _DropOfRoots] = []
        # What stores have been asked to drop, and their answers. A drop ends before late answers, these do not.
        self._dropping: list[tuple[Callable[[EntryKey], bool], list[Future[Any]]]] = []

    def __len__(self) -> int:
        return len(self._finds) + len(self._firsts) + len(self._drops)

    def usable_stores(self) -> list[StoreQueue]:
        """The stores that answer."""
        return [store for store in self._stores if not store.is_stuck]

    def find(self, keys: tuple[EntryKey, ...], future: "Future[int]") -> None:
        """The future gets the number of leading keys that host memory or a store has."""
        find = _Find(keys, future, self._clock() + FIND_LIMIT_S, 0, Future(), self.usable_stores())
        self._finds.append(find)
        find.answer.set_result(0)
        self._advance_find(find)

    def find_first(self, keys: tuple[EntryKey, ...], future: "Future[int]") -> None:
        """The future gets the position of the first of these keys that host memory or a store has; their number if none
        has any."""
        before = keys[: self._host.first(keys)]
        stores = self.usable_stores() if before else []
        answers = [store.first(before) for store in stores]
        self._firsts.append(_FindFirst(before, future, self._clock() + FIND_LIMIT_S, answers))
        self._advance_first(self._firsts[-1])

    def drop(self, keys: tuple[EntryKey, ...], future: "Future[None]") -> None:
        """Forgets entries. The future is done when all stores have."""
        self._host.drop(keys)
        answers = {store.name: store.drop(keys) for store in self._stores}
        self._remember_drop(frozenset(keys).__contains__, answers.values())
        self._await_drop(_Drop(future, self._clock() + DROP_LIMIT_S, answers))

    def drop_damaged(self, keys: tuple[EntryKey, ...], source: str) -> None:
        """Forgets entries in host memory and in the store that they came from."""
        self._host.drop(keys)
        answers = [store.drop(keys) for store in self._stores if store.name == source]
        self._remember_drop(frozenset(keys).__contains__, answers)

    def is_dropping(self, key: EntryKey) -> bool:
        """Whether an entry is dropped, and a store that has not answered yet may have it still."""
        if not self._dropping:
            return False
        self._dropping = [each for each in self._dropping if not all(answer.done() for answer in each[1])]
        return any(matches(key) for matches, _ in self._dropping)

    def drop_roots(self, roots: frozenset[bytes], future: "Future[DroppedEntries]") -> None:
        """Forgets every entry with one of these roots. The future is done when all stores have, or are late."""
        from_host = self._host.drop_roots(roots)
        answers = {store.name: store.drop_roots(roots) for store in self._stores}
        self._remember_drop(lambda key: key.root in roots, answers.values())
        self._await_drop(_DropOfRoots(future, self._clock() + DROP_LIMIT_S, from_host, answers))

    def step(self) -> bool:
        """Takes the answers of the stores. Returns whether a call has ended."""
        found = [self._advance_find(find) for find in tuple(self._finds)]
        first = [self._advance_first(find) for find in tuple(self._firsts)]
        dropped = [self._advance_drop(drop) for drop in tuple(self._drops)]
        return any(found) or any(first) or any(dropped)

    def stop_waiting(self) -> None:
        """Ends searches with what they have found. Drops get no answer, though stores still drop."""
        for find in self._finds:
            find.future.set_result(find.found)
        for first in self._firsts:
            first.future.set_result(len(first.keys))
        self._finds.clear()
        self._firsts.clear()
        self._drops.clear()

    def _advance_find(self, find: _Find) -> bool:
        """Goes on where a search stands, because host memory and stores may have entries in turn. Returns whether it
        has ended."""
        is_late = self._clock() >= find.end_s
        if not find.answer.done() and not is_late:
            return False
        more = find.answer.result() if find.answer.done() else 0
        if more:
            find.others = self.usable_stores()
        find.found += more
        in_host = self._host.find(find.keys[find.found :])
        if in_host:
            find.found += in_host
            find.others = self.usable_stores()
        if find.found < len(find.keys) and find.others and not is_late:
            find.answer = find.others.pop(0).has(find.keys[find.found :])
            return False
        self._finds.remove(find)
        find.future.set_result(find.found)
        return True

    def _advance_first(self, find: _FindFirst) -> bool:
        answers = [answer.result() for answer in find.answers if answer.done()]
        if len(answers) < len(find.answers) and self._clock() < find.end_s:
            return False
        self._firsts.remove(find)
        find.future.set_result(min(answers, default=len(find.keys)))
        return True

    def _remember_drop(self, matches: Callable[[EntryKey], bool], answers: Iterable[Future[Any]]) -> None:
        self._dropping = [each for each in self._dropping if not all(answer.done() for answer in each[1])]
        if waiting := [answer for answer in answers if not answer.done()]:
            self._dropping.append((matches, waiting))

    def _await_drop(self, drop: _Drop | _DropOfRoots) -> None:
        self._drops.append(drop)
        self._advance_drop(drop)

    def _advance_drop(self, drop: _Drop | _DropOfRoots) -> bool:
        waiting = [name for name, answer in drop.answers.items() if not answer.done()]
        if waiting and self._clock() < drop.end_s:
            return False
        self._drops.remove(drop)
        if isinstance(drop, _DropOfRoots):
            drop.future.set_result(_dropped(drop, waiting))
        elif waiting:
            drop.future.set_exception(
                DeadlineExceeded(f"the store {waiting[0]} has not dropped the entries within {DROP_LIMIT_S:g} s")
            )
        else:
            drop.future.set_result(None)
        return True


def _dropped(drop: _DropOfRoots, waiting: list[str]) -> DroppedEntries:
    """What the stores have answered, but for those that still are waited for."""
    counts, left = {HOST: drop.from_host}, dict.fromkeys(waiting, f"it has not answered within {DROP_LIMIT_S:g} s")
    for name, answer in drop.answers.items():
        if name not in left:
            count = answer.result()
            if count is None:
                left[name] = "it could not be asked, or not all of them could be removed"
            else:
                counts[name] = count
    return DroppedEntries(counts, left)
