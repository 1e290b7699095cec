"""Bounds of settings: every number has a least and a greatest value.

No machine reaches the greatest values: beyond them arithmetic overflows, or a loop or a table never ends. The least
values keep a loop from taking a core: a time is at least DURATION_S_MIN, or 0 where that means something.
"""

SECONDS_MAX, RATE_MAX = 1e9, 1e9
DURATION_S_MIN = 0.001
KEEPALIVE_S = 10.0  # the default, also of channels of clients, which have no settings
KEEPALIVE_S_MIN = 0.6  # servers refuse more than two pings a second
RATE_MIN = 0.001  # in GB/s
SIZE_MIB_MIN = 0.001
COUNT_MAX = 1 << 20
TOKENS_MAX = 2**31 - 1  # positions take 32 bits
TOPOLOGY_LABELS_MAX = 8  # of one node, such as region, zone, rack and host
