"""In how many groups the layers of a chunk leave, so that little is left to send when the chunk is computed. Pure.

What a group takes beside its bytes is paid while the chunk computes; what stays exposed is the last group. So with g
groups a chunk of S bytes over a link of a cost for each message adds, at most, about

    g * cost + S / (g * bytes_per_s)

which is least at g = sqrt(S / (cost * bytes_per_s)). The cost is that of a message and of another turn to the threads
that send. Knows neither requests nor steps.
"""

import math

from kvtransfer.link import LinkSpeed


def choose_layers_per_group(link: LinkSpeed, *, turn_s: float, chunk_bytes: int, num_layers: int) -> int:
    """How many layers of a chunk go together; all of them where a group would cost more than it hides.

    Args:
        turn_s: from the event loop to the sending threads and back.
        chunk_bytes: of all layers.
    """
    costs = (link.message_cost_s + link.latency_s + turn_s) * link.bytes_per_s
    groups = math.sqrt(chunk_bytes / costs) if costs > 0 else num_layers
    return math.ceil(num_layers / min(max(round(groups), 1), num_layers))
