"""Which entries of a store are kept for a time, and how many each tenant may have. Pure.

Kept entries leave after all others, so they take room from everybody else. That is why their number is bounded: each
tenant has a share of the store, and all tenants together have one. An entry also keeps those before it, which cannot
leave before it. So callers keep a sequence in order from its beginning, and end it in the opposite order: then an entry
is kept only while those before it are kept too, and counted.
"""

import heapq
from collections import Counter
from dataclasses import dataclass

# Of a store's entries.
TENANT_SHARE = 1 / 4
ALL_SHARE = 1 / 2


@dataclass(frozen=True, slots=True)
class _Kept:
    tenant: int
    until_s: float


class KeepTimes:
    """The kept entries of one store.

    Args:
        capacity: entries of the full store.
    """

    def __init__(self, capacity: int) -> None:
        self._tenant_max = int(capacity * TENANT_SHARE)
        self._max = int(capacity * ALL_SHARE)
        self._kept: dict[bytes, _Kept] = {}
        self._by_tenant = Counter[int]()
        # May have rows of times that have changed since.
        self._ends: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def keep(self, key: bytes, *, tenant: int, until_s: float) -> bool:
        """Keeps an entry, unless it is kept for longer already. Returns False if there is no room for the tenant."""
        known = self._kept.get(key)
        if known is not None and known.until_s >= until_s:
            return True
        if known is None or known.tenant != tenant:
            if self._by_tenant[tenant] >= self._tenant_max or (known is None and len(self._kept) >= self._max):
                return False
            self.forget(key)
            self._by_tenant[tenant] += 1
        self._kept[key] = _Kept(tenant, until_s)
        heapq.heappush(self._ends, (until_s, key))
        if len(self._ends) > 2 * len(self._kept) + 64:
            self._ends = [(kept.until_s, each) for each, kept in self._kept.items()]
            heapq.heapify(self._ends)
        return True

    def is_others(self, key: bytes, tenant: int) -> bool:
        """Whether another tenant keeps an entry."""
        known = self._kept.get(key)
        return known is not None and known.tenant != tenant

    def forget(self, key: bytes) -> None:
        """Keeps an entry no longer, if it was kept."""
        known = self._kept.pop(key, None)
        if known is None:
            return
        self._by_tenant[known.tenant] -= 1
        if not self._by_tenant[known.tenant]:
            del self._by_tenant[known.tenant]

    def take_expired(self, now_s: float) -> list[bytes]:
        """Forgets the entries whose time is over. Returns them."""
        over = []
        while self._ends and self._ends[0][0] <= now_s:
            _, key = heapq.heappop(self._ends)
            known = self._kept.get(key)
            if known is not None and known.until_s <= now_s:
                self.forget(key)
                over.append(key)
        return over
