"""What a link was measured to do, and which message size suits a job over it. Pure; no torch, no clock.

A message of m bytes takes `cost + m / bytes_per_s`, where the cost is that of the link and of handling. Gather, sending
and scatter of neighbouring segments overlap, so that a job of S bytes in segments of m takes about

    S / m * cost + S / bytes_per_s + 2 * m / bytes_per_s

(the first segment's gather and the last one's scatter are exposed), least at m = sqrt(S * cost * bytes_per_s / 2).
Knows neither peers nor transports.
"""

import math
from dataclasses import dataclass

# Under it a message is hardly more than its cost, whatever was measured.
LEAST_PAYLOAD_BYTES = 64 << 10


@dataclass(frozen=True)
class LinkSpeed:
    """Of one direction of a warm link.

    Attributes:
        latency_s: of a message without payload, one way.
        message_cost_s: of one more message, whatever its size, while messages overlap.
        bytes_per_s: of large messages.
    """

    latency_s: float
    message_cost_s: float
    bytes_per_s: float


def choose_payload_bytes(link: LinkSpeed, *, job_bytes: int, limit: int, handling_s: float = 0.0) -> int:
    """Largest payload of one message for a job of that size: between 64 KiB and `limit`, which is a staging slot's.

    Args:
        handling_s: what a segment takes of either side's host beside the link, whatever its size. Between two H200s it
            is about as much as the link's own cost, 30-40 us each, and sizes matter little: 8192 tokens of Llama 8B
            took 3.8 ms in segments of 64 MiB, 3.9 in the 96 MiB chosen here, 4.1 in 256 MiB.
    """
    best = math.sqrt(job_bytes * (link.message_cost_s + handling_s) * link.bytes_per_s / 2)
    return int(min(max(best, LEAST_PAYLOAD_BYTES), limit))


def message_cost_s(*, small_bytes: int, small_s: float, large_bytes: int, large_s: float) -> float:
    """What a message costs whatever its size: where the line through two sizes' times crosses no bytes at all.

    At least half of the time of a small message: noise, or caches that a large one does not fit into, would take it to
    zero and below.
    """
    per_byte_s = (large_s - small_s) / (large_bytes - small_bytes)
    return min(max(small_s / 2, small_s - small_bytes * per_byte_s), small_s)
