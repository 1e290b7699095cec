"""The facts about the node that its machine needs. Plain values."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeRules:
    """The node's identity, which goes into tickets, and its limits.

    Attributes:
        lease_s: how long a lease may wait for its KV.
        local_prefill_tokens: a prompt with fewer uncached tokens is prefilled here.
        waiting_max: how many requests may wait for blocks.
    """

    name: str
    address: str
    incarnation: int
    lease_s: float
    local_prefill_tokens: int
    waiting_max: int
