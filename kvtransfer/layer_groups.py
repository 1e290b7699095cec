"""Chooses how many layers of a chunk to send together, so that little is left to send once the chunk is computed. Pure.

All groups but the last are sent while the chunk computes. With g groups, a chunk of S bytes adds at most about

    g * cost + S / (g * bytes_per_s)

to the first token's time, which is least at g = sqrt(S / (cost * bytes_per_s)). `cost` is the time of one more message
plus one more turn of the sending threads.
"""

import math

from kvtransfer.link import LinkSpeed


def choose_layers_per_group(link: LinkSpeed, *, turn_s: float, chunk_bytes: int, num_layers: int) -> int:
    """Number of layers of a chunk to send together; all of them if a group would cost more than it hides.

    Args:
        turn_s: time from the event loop to the sending threads and back.
        chunk_bytes: size of a chunk over all layers.
    """
    costs = (link.message_cost_s + link.latency_s + turn_s) * link.bytes_per_s
    groups = math.sqrt(chunk_bytes / costs) if costs > 0 else num_layers
    return math.ceil(num_layers / min(max(round(groups), 1), num_layers))
