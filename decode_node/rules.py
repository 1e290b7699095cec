"""The facts about the node that its machine needs. Plain values."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtransfer.segments import LEASE_KEY_BYTES


@dataclass(frozen=True)
class DecodeRules:
    """The node's identity, which goes into tickets, and its limits.

    Attributes:
        lease_s: how long a lease may wait for its KV.
        why_local: maps a prompt's uncached and cached tokens to the reason to prefill it here although a prefill node
            is available; empty: there is none.
        waiting_max: maximum number of requests that wait for blocks.
        block_size: tokens of one block of the cache. The first part of a split prompt has whole blocks.
        lease_secret: up to 64 random bytes of this process, which no other process gets.
        prefetches: whether there are stores outside of the cache.
        gives_leases: False on a prefill node that also decodes: it computes every prompt itself, so no KV arrives.
    """

    name: str
    address: str
    incarnation: int
    lease_s: float
    why_local: Callable[[int, int], str]
    waiting_max: int
    block_size: int
    lease_secret: bytes = field(repr=False)
    gives_leases: bool = True
    prefetches: bool = False

    def lease_key(self, number: int) -> bytes:
        """The key of a lease. Without the secret nobody can compute it; like the number, it is used once."""
        return hashlib.blake2b(
            number.to_bytes(8, "little"), digest_size=LEASE_KEY_BYTES, key=self.lease_secret
        ).digest()
