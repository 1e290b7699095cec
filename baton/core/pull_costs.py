"""What a pull of KV from another node costs, and whether it is worth it. Pure.

A node decides by it, gateways predict by it what the node will do, and `baton plan` simulates it.
"""

from dataclasses import dataclass

# Where nothing is measured, fewer tokens than these are computed.
UNMEASURED_TOKENS = 512
# A pull must be predicted to take less than this share of the time to compute its tokens: their load into the cache and
# the place of the prompt in the queue, which a pull delays, cost time too.
SHARE = 0.7
# A node gives up a pull that takes longer.
PULL_S_MAX = 5.0


@dataclass(frozen=True)
class PullCosts:
    """The time of pulls: a fixed part, and one for each byte."""

    fixed_s: float
    byte_s: float

    def seconds(self, num_bytes: int) -> float:
        return self.fixed_s + self.byte_s * num_bytes


# What counts until a node has measured its pulls: about what two nodes on two CPU cores reached
# (`bench/results/kept_kv.md`), which every network of a cluster with GPUs exceeds.
ASSUMED_PULL = PullCosts(fixed_s=5e-3, byte_s=1 / 2e9)

# How fast host memory is read back until a node has measured it: about a quarter of what PCIe 4 moves, but fast enough
# that nodes get requests from which they can measure it.
ASSUMED_LOAD_BYTES_PER_S = 5e9

# How fast files and a shared store are read into host memory until a node has measured it. Low, because a disk may be
# slow; but not so low that nodes get no requests from which they can measure it.
ASSUMED_READ_BYTES_PER_S = 1e9


def is_worth_pulling(tokens: int, pull_s: float | None, compute_s: float | None) -> bool:
    """Whether to pull that many tokens.

    Args:
        pull_s: predicted time of the pull; None: unknown.
        compute_s: predicted time to compute the tokens; None: unknown.
    """
    if pull_s is None or compute_s is None:
        return tokens >= UNMEASURED_TOKENS
    return pull_s < SHARE * compute_s


def predicted_pull_s(costs: PullCosts | None, tokens: int, num_bytes: int, compute_s: float) -> float | None:
    """The time that a node's pull of these tokens will take. Returns None if the node will compute them.

    Args:
        costs: that the node has measured; None: none yet.
        compute_s: predicted time to compute the tokens.
    """
    pull_s = (costs or ASSUMED_PULL).seconds(num_bytes)
    if pull_s > min(PULL_S_MAX, SHARE * compute_s):
        return None
    return pull_s if is_worth_pulling(tokens, None if costs is None else pull_s, compute_s) else None
