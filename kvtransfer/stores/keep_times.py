"""Which entries of a store are kept for a time, and how many each tenant may have. Pure.

Kept entries leave after all others, so they take room from everybody else. That is why their number is bounded: each
tenant has a share of the store, and all tenants together have one. An entry also keeps those before it, which are
useful without it but cannot leave before it. So it is kept only where these are kept too, and no longer than they are.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

# Of a store's entries.
TENANT_SHARE = 1 / 4
ALL_SHARE = 1 / 2


@dataclass(slots=True)
class _Kept:
    tenant: int
    parent: bytes
    until_s: float


class KeepTimes:
    """The kept entries of one store.

    Args:
        capacity: entries of the full store.
        clock: monotonic seconds.
    """

    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        self._tenant_max = int(capacity * TENANT_SHARE)
        self._max = int(capacity * ALL_SHARE)
        self._clock = clock
        self._kept: dict[bytes, _Kept] = {}
        self._by_tenant = Counter[int]()
        self._followers = Counter[bytes]()  # kept entries that follow an entry
        # May have rows of times that have changed since.
        self._ends: list[tuple[float, bytes]] = []

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: bytes, parent: bytes, *, is_first: bool, tenant: int, seconds: float) -> bool:
        """Keeps an entry from now on, unless it is kept for longer already. Returns False if it may not be kept for so
        long: there is no room, or the entry before it is not kept for so long.

        Args:
            is_first: its sequence begins with it.
        """
        until_s = self._clock() + seconds
        before = self._kept.get(parent)
        if not is_first:
            if before is None:
                return False
            until_s = min(until_s, before.until_s)
        known = self._kept.get(key)
        if known is not None and known.until_s >= until_s:
            return True
        if known is None or known.tenant != tenant:
            if self._by_tenant[tenant] >= self._tenant_max or (known is None and len(self._kept) >= self._max):
                return False
            self.forget(key)
            self._by_tenant[tenant] += 1
            self._followers[parent] += 1
        self._kept[key] = _Kept(tenant, parent, until_s)
        heapq.heappush(self._ends, (until_s, key))
        if len(self._ends) > 2 * len(self._kept) + 64:
            self._ends = [(kept.until_s, each) for each, kept in self._kept.items()]
            heapq.heapify(self._ends)
        return True

    def may_end(self, key: bytes, tenant: int) -> bool:
        """Whether this tenant may end an entry: it is not another tenant's, and none that follows it is kept."""
        known = self._kept.get(key)
        return (known is None or known.tenant == tenant) and key not in self._followers

    def forget(self, key: bytes) -> None:
        """Keeps an entry no longer, if it was kept."""
        known = self._kept.pop(key, None)
        if known is None:
            return
        self._by_tenant[known.tenant] -= 1
        if not self._by_tenant[known.tenant]:
            del self._by_tenant[known.tenant]
        self._followers[known.parent] -= 1
        if not self._followers[known.parent]:
            del self._followers[known.parent]

    def take_expired(self) -> list[bytes]:
        """Forgets the entries whose time is over. Returns them."""
        now_s, over = self._clock(), []
        while self._ends and self._ends[0][0] <= now_s:
            until_s, key = heapq.heappop(self._ends)
            known = self._kept.get(key)
            if known is not None and known.until_s <= until_s:
                self.forget(key)
                over.append(key)
        return over
