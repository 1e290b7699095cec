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
        why_local: why a prompt with so many uncached tokens after so many cached ones is prefilled here, although a
            prefill node is available; empty: it is not.
        waiting_max: how many requests may wait for blocks.
        block_size: tokens of one block of the cache.
        split_unit: the first part of a split prompt is a multiple of so many tokens; itself a multiple of `block_size`.
        lease_secret: up to 64 random bytes of this process, which no other process gets.
        gives_leases: False: a prefill node, which decodes only what it has prefilled itself, so that no KV arrives.
    """

    name: str
    address: str
    incarnation: int
    lease_s: float
    why_local: Callable[[int, int], str]
    waiting_max: int
    block_size: int
    split_unit: int
    lease_secret: bytes = field(repr=False)
    gives_leases: bool = True

    def lease_key(self, number: int) -> bytes:
        """The key of a lease. To whoever does not know the secret it is random; it is used once, as the number is."""
        return hashlib.blake2b(
            number.to_bytes(8, "little"), digest_size=LEASE_KEY_BYTES, key=self.lease_secret
        ).digest()
