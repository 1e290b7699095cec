"""One run as plain data: a cluster, a load, and a schedule of faults. The same seed draws the same run."""

from dataclasses import dataclass
from random import Random

from tests.chaos.faults import KINDS
from tests.chaos.works import Work, draw_works

CLIENT, PAIRS = "client", "pairs"
# What a request may end with while nodes and gateways are gone: nothing else.
ALLOWED = frozenset({"NO_NODE", "OVERLOADED", "DRAINING"})


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        number: from 0, in order of time.
        kind: its name in `faults.KINDS`.
        target: a process, such as "p1", or a link, such as "g1-d2".
        at_s: its begin, after the begin of the storm.
    """

    number: int
    kind: str
    target: str
    at_s: float
    seconds: float
    detail: str = ""


@dataclass(frozen=True)
class Load:
    """A steady load.

    Attributes:
        clients: requests at once; each client sends its next one after a pause.
        pause_s, refused_pause_s: the longest pause, after an answer and after an error.
        cancelled, with_deadline: shares of the requests.
        deadline_s: the shortest and the longest.
    """

    clients: int = 6
    pause_s: float = 0.4
    refused_pause_s: float = 2.0
    cancelled: float = 0.1
    with_deadline: float = 0.1
    deadline_s: tuple[float, float] = (0.05, 3.0)


@dataclass(frozen=True)
class Scenario:
    """A run.

    Attributes:
        prefills, decodes, gateways: names of the processes.
        policy: the gateways' local policy.
        seconds: how long the storm lasts.
        works: what clients ask for.
        faults: in order of time; several may be under way at once.
        allowed: errors that a request may end with during the storm.
    """

    seed: int
    prefills: tuple[str, ...]
    decodes: tuple[str, ...]
    gateways: tuple[str, ...]
    policy: str
    seconds: float
    load: Load
    works: tuple[Work, ...]
    faults: tuple[Fault, ...]
    allowed: frozenset[str] = ALLOWED

    @property
    def links(self) -> tuple[str, ...]:
        """Every link of the network, by name: client to gateway, gateway to node, and all prefill nodes to a decode
        node."""
        to_nodes = [f"{gateway}-{node}" for gateway in self.gateways for node in (*self.prefills, *self.decodes)]
        to_gateways = [f"{CLIENT}-{gateway}" for gateway in self.gateways]
        return (*to_gateways, *to_nodes, *(f"{PAIRS}-{node}" for node in self.decodes))


def draw(
    seed: int,
    *,
    seconds: float,
    every_s: float = 2.0,
    prefills: int = 2,
    decodes: int = 2,
    load: Load | None = None,
) -> Scenario:
    """Draws a run.

    Args:
        every_s: mean time between two faults.
    """
    random = Random(seed)
    names = {
        "prefill": tuple(f"p{number}" for number in range(1, prefills + 1)),
        "decode": tuple(f"d{number}" for number in range(1, decodes + 1)),
        "gateway": ("g1", "g2"),
    }
    calm = Scenario(
        seed=seed,
        prefills=names["prefill"],
        decodes=names["decode"],
        gateways=names["gateway"],
        policy=random.choice(("elastic", "prefer", "strict")),
        seconds=seconds,
        load=load or Load(),
        works=draw_works(random),
        faults=(),
    )
    targets = {**names, "link": calm.links}
    faults = _draw_faults(random, targets, seconds=seconds, every_s=every_s)
    return Scenario(**{**vars(calm), "faults": faults})


def _draw_faults(
    random: Random, targets: dict[str, tuple[str, ...]], *, seconds: float, every_s: float
) -> tuple[Fault, ...]:
    kinds, weights = list(KINDS), [kind.weight for kind in KINDS.values()]
    faults: list[Fault] = []
    at_s = 0.0
    while (at_s := at_s + random.expovariate(1 / every_s)) < seconds:
        for _ in range(random.choice((1, 1, 1, 2, 3))):  # several at the same time
            name = random.choices(kinds, weights)[0]
            kind = KINDS[name]
            hit = random.choice([target for on in kind.on for target in targets[on]])
            duration_s, detail = random.uniform(*kind.seconds), random.choice(kind.details)
            faults.append(Fault(len(faults), name, hit, at_s, duration_s, detail))
    return tuple(faults)
