"""Time that requests and steps spend outside of the GPUs: on the nodes' hosts and in the gateways. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class HostTimes:
    """Times of hosts and gateways, which are measured and not derived from step costs.

    Args:
        hop_s: from the client to the first node, and the first token's way back, while the gateways are idle.
        remote_s: how much later than on the decode node a prompt's computation ends on a prefill node: the decode node
            reserves room first, and KV is sent while layers are computed.
        hand_over_s: from the last byte on the link to the request's admission on the decode node.
        lead_s: how long before the end of a step the next one is launched; what arrives later misses it.
        mixed_s: time of a step with prompts and decodes beyond what the step costs say.
        later_token_s: likewise, of each token of a prompt's second and later slices, which attend to earlier ones.
        row_s: host time for each decoding request of a step. A step takes at least this long for all its rows.
        stall_share, stall_s: share of the steps whose tokens are late, and their delay.
        token_s: time of one gateway process to send one token.
        gateways: number of gateway processes.
    """

    hop_s: float = 2e-3
    remote_s: float = 0.0
    hand_over_s: float = 1e-3
    lead_s: float = 0.0
    mixed_s: float = 0.0
    later_token_s: float = 0.0
    row_s: float = 0.0
    stall_share: float = 0.0
    stall_s: float = 0.0
    token_s: float = 0.0
    gateways: int = 1

    def wait_s(self, steps: Iterable[tuple[int, float]]) -> float:
        """Mean wait of a message at a gateway that sends the tokens of all nodes' steps.

        A step's tokens arrive at once and are sent one after the other. A message that arrives meanwhile waits for half
        of them on average.

        Args:
            steps: rows and seconds of the step that each node runs.
        """
        if not self.token_s:
            return 0.0
        share = self.token_s / self.gateways
        found = list(steps)
        busy = min(1.0, share * sum(rows / seconds for rows, seconds in found))
        return busy * share * max((rows for rows, _ in found), default=0) / 2

    def late_s(self, rows: int) -> float:
        """Delay from the step's end until a late token reaches the client: a stall of the node, and up to half of the
        tokens of `rows` requests at the gateway."""
        return self.stall_s + self.token_s / self.gateways * rows / 2


NO_HOST_TIME = HostTimes(hop_s=0.0, hand_over_s=0.0)
