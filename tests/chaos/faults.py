"""The table of faults: what may happen to which processes and links, how often, and for how long.

A new kind is a row of `KINDS` and a method of the same name in `storm.Storm`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tests.chaos.steps import DECODE_STEPS, PREFILL_STEPS


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        on: "prefill", "decode", "gateway": one process of these roles; "link": one link of the network.
        seconds: its shortest and its longest duration.
        weight: how often it is drawn, next to the others.
        details: one of these is drawn with it.
    """

    on: tuple[str, ...]
    seconds: tuple[float, float]
    weight: float
    details: tuple[str, ...] = ("",)


_NODES = ("prefill", "decode")
_ALL = (*_NODES, "gateway")
KINDS: Mapping[str, Kind] = {
    # The process ends at once, and starts again at its address.
    "kill": Kind(_ALL, (0.2, 4.0), 4),
    # SIGSTOP, then SIGCONT. The longest ones outlast every keepalive.
    "freeze": Kind(_ALL, (0.5, 12.0), 2.5),
    # SIGTERM: it ends its requests or hands them over, ends, and starts again.
    "drain": Kind(_ALL, (0.1, 2.0), 1.5),
    # It starts again as a process that dies where it says, when it first comes there, and then starts again.
    "die_prefill": Kind(("prefill",), (0.1, 1.0), 3, PREFILL_STEPS),
    "die_decode": Kind(("decode",), (0.1, 1.0), 3, DECODE_STEPS),
    # It starts again as a process that damages some of the segments that it sends.
    "damage": Kind(("prefill",), (3.0, 8.0), 1),
    # A file of KV in the directory that all nodes share loses a bit or its end, and so does the log of keep times.
    "rot": Kind(_NODES, (0.0, 0.1), 1.5),
    # It starts again as a process whose host memory loses bits of entries.
    "bad_memory": Kind(_NODES, (3.0, 8.0), 1),
    # It starts again as a process whose writes to files fail, most of them after a part.
    "full_disk": Kind(_NODES, (3.0, 8.0), 1),
    # Connections are reset, and refused for a while.
    "cut": Kind(("link",), (0.5, 6.0), 2),
    # Connections are reset; new ones work.
    "reset": Kind(("link",), (0.0, 0.1), 2),
    # Nothing more comes through, in one direction or in both; connections stay open.
    "half_open": Kind(("link",), (0.5, 12.0), 2, ("there", "back", "both")),
    "delay": Kind(("link",), (2.0, 8.0), 1, ("0.02", "0.1", "0.3")),
    "slow": Kind(("link",), (2.0, 8.0), 1, ("20000", "100000")),
}
