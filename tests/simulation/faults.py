"""The table of faults: what may happen to processes and connections, how often, and for how long.

A new kind of fault is a row of `KINDS` and a method of the same name in `cluster.Cluster`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from tests.simulation.weather import Weather

GATEWAY = "g"
PREFILLS = ("p1", "p2")
DECODES = ("d1", "d2")
NODES = PREFILLS + DECODES


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        targets: the fault hits one of these processes, or one pair of them.
        seconds: its shortest and its longest duration.
    """

    targets: tuple[tuple[str, ...], ...]
    seconds: tuple[float, float]


_PROCESSES = tuple((name,) for name in NODES)
_CONNECTIONS = (
    *((GATEWAY, node) for node in NODES),
    *((prefill, decode) for prefill in PREFILLS for decode in DECODES),
)
KINDS: Mapping[str, Kind] = {
    # The process ends at once, and starts again afterwards as another incarnation.
    "kill": Kind(_PROCESSES, (0.02, 1.0)),
    # The gateway ends, with all of its requests.
    "kill_gateway": Kind(((GATEWAY,),), (0.02, 0.3)),
    # SIGSTOP, then SIGCONT: the process handles everything that came meanwhile at once.
    "freeze": Kind((*_PROCESSES, (GATEWAY,)), (0.01, 2.5)),
    # All streams between two processes break; new ones can be made.
    "cut": Kind(_CONNECTIONS, (0.0, 0.0)),
    # Nothing arrives between two processes; nothing is lost.
    "stall": Kind(_CONNECTIONS, (0.05, 2.0)),
    # The node's steps take many times longer.
    "slow": Kind(_PROCESSES, (0.1, 1.0)),
    # The next engine step fails.
    "fail_step": Kind(_PROCESSES, (0.0, 0.0)),
    # Every step fails for a while: the gateway's breaker opens.
    "sick": Kind(_PROCESSES, (0.05, 0.6)),
    # Another client of the node sends whatever it likes: keys in use, leases that are not its own, broken requests.
    "hostile_client": Kind(_PROCESSES, (0.02, 0.3)),
    # A prefill node reports leases as handed over or lost that are not its own.
    "liar": Kind(tuple((prefill, decode) for prefill in PREFILLS for decode in DECODES), (0.02, 0.3)),
    # SIGTERM: takes no new work, ends when it is idle or its grace is over, and starts again.
    "drain": Kind(_PROCESSES, (0.05, 0.5)),
}


@dataclass(frozen=True)
class Fault:
    """One fault of a scenario.

    Attributes:
        kind: its name in `KINDS`.
        target: the processes that it hits.
        at_s: its start, counted from the cluster's readiness.
        seconds: its duration.
    """

    kind: str
    target: tuple[str, ...]
    at_s: float
    seconds: float


@dataclass(frozen=True)
class Storm:
    """The kinds and number of faults in a run.

    Attributes:
        weights: by kind; a missing kind never happens.
        most: maximum number of faults in a run.
        haste: divides the duration of faults.
        targets: if given, faults hit only these processes.
        weather: for all runs; if not given, each run's seed draws it.
        rush: probability that all requests come at once, and the faults right then.
    """

    weights: Mapping[str, float]
    most: int = 3
    haste: float = 1.0
    targets: tuple[str, ...] = ()
    weather: Weather | None = None
    rush: float = 0.1


USUAL = Storm(
    {
        "kill": 4,
        "kill_gateway": 0.5,
        "freeze": 2,
        "cut": 3,
        "stall": 2,
        "slow": 1,
        "fail_step": 1,
        "sick": 0.5,
        "hostile_client": 1,
        "liar": 1,
        "drain": 1,
    }
)

# Hits prefill nodes while they compute prompts for decode nodes and decode themselves.
BUSY_PREFILL_NODES = Storm(
    {kind: 1 for kind in KINDS if kind not in ("kill_gateway", "liar")},
    most=6,
    targets=(GATEWAY, *PREFILLS),
    weather=Weather(),
    rush=1.0,
)


def draw_faults(random: Random, storm: Storm, *, within_s: float) -> tuple[Fault, ...]:
    names, weights = list(storm.weights), list(storm.weights.values())
    faults = []
    for _ in range(random.randint(0, storm.most)):
        name = random.choices(names, weights)[0]
        kind = KINDS[name]
        seconds = random.uniform(*kind.seconds) / storm.haste
        targets = [target for target in kind.targets if not storm.targets or set(target) <= set(storm.targets)]
        faults.append(Fault(name, random.choice(targets), within_s * random.random(), seconds))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
