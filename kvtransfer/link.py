"""The measured speed of a link, and the message size that suits a job over it. Pure; no torch, no clock.

A message of m bytes takes `cost + m / bytes_per_s`; `cost` covers the link and the handling on both hosts. Gather, send
and scatter of successive segments overlap, so a job of S bytes in segments of m takes about

    S / m * cost + S / bytes_per_s + 2 * m / bytes_per_s

(the first gather and the last scatter are exposed), which is least at m = sqrt(S * cost * bytes_per_s / 2).
"""

import math
from dataclasses import dataclass

# A smaller message takes hardly longer than its fixed cost, on any link.
LEAST_PAYLOAD_BYTES = 64 << 10


@dataclass(frozen=True)
class LinkSpeed:
    """The speed of one direction of a warm link.

    Attributes:
        latency_s: one-way time of a message without payload.
        message_cost_s: time that one more message adds, independent of its size, while messages overlap.
        bytes_per_s: rate of large messages.
    """

    latency_s: float
    message_cost_s: float
    bytes_per_s: float


def choose_payload_bytes(link: LinkSpeed, *, job_bytes: int, limit: int, handling_s: float = 0.0) -> int:
    """Largest payload of one message for a job of that size: between 64 KiB and `limit`, a staging slot's payload.

    Args:
        handling_s: host time per segment on either side, independent of its size, in addition to the link's. Between
            two H200s it equals about the link's own cost, 30-40 us each, and sizes matter little: 8192 tokens of Llama
            8B took 3.8 ms in segments of 64 MiB, 3.9 in the 96 MiB chosen here, 4.1 in 256 MiB.
    """
    best = math.sqrt(job_bytes * (link.message_cost_s + handling_s) * link.bytes_per_s / 2)
    return int(min(max(best, LEAST_PAYLOAD_BYTES), limit))


def message_cost_s(*, small_bytes: int, small_s: float, large_bytes: int, large_s: float) -> float:
    """The fixed cost of a message: the time at zero bytes on the line through two measured sizes.

    At least half of a small message's time: noise, or CPU caches that a large message exceeds, would give zero or less.
    """
    per_byte_s = (large_s - small_s) / (large_bytes - small_bytes)
    return min(max(small_s / 2, small_s - small_bytes * per_byte_s), small_s)
