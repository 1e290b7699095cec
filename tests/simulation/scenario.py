"""The sizes, requests and faults that a seed draws before the run. Pure."""

from dataclasses import dataclass
from random import Random

from baton.core.types import LocalPolicy
from tests.simulation.faults import Fault, Storm, draw_faults
from tests.simulation.reference import EOS, MAX_CONTEXT_TOKENS, NUM_LAYERS
from tests.simulation.weather import Weather


@dataclass(frozen=True)
class Sizes:
    """The sizes of one role's engines."""

    num_blocks: int
    block_size: int
    batch_tokens: int
    max_waiting: int

    @property
    def context_tokens(self) -> int:
        """Longest prompt plus output."""
        return min(MAX_CONTEXT_TOKENS, self.num_blocks * self.block_size)


@dataclass(frozen=True)
class Client:
    """One request: its start (counted from the cluster's readiness), its content, and when its client gives up.

    Attributes:
        resumes: when its gateway dies, it goes on at the next one, as `baton.client.client.Client` does with several.
    """

    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    timeout_s: float
    cancel_s: float | None
    priority: int
    prompt_logprobs: int | None
    ttft_s: float | None
    tpot_s: float | None
    resumes: bool

    @property
    def patient(self) -> bool:
        """Whether its deadline is later than any fault lasts."""
        return self.timeout_s > 1.0


@dataclass(frozen=True)
class Scenario:
    """What a seed decides.

    Attributes:
        also_decodes: probability that a prefill node that starts also decodes.
    """

    policy: LocalPolicy
    prefill: Sizes
    decode: Sizes
    segment_bytes: int
    layers_per_group: int
    lease_s: float
    local_prefill_tokens: int
    waiting_max: int
    max_queue_s: float
    weather: Weather
    clients: tuple[Client, ...]
    faults: tuple[Fault, ...]
    failover_wait_s: float
    also_decodes: float

    @property
    def contexts(self) -> frozenset[int]:
        """Longest prompt plus output of the nodes that may decode."""
        alone = {self.prefill.context_tokens} if self.also_decodes else set[int]()
        return frozenset({self.decode.context_tokens} | alone)

    @property
    def prefetch_s(self) -> float:
        """How long nodes look for a prompt in stores outside of their caches, where there is none; 0: there are no
        stores. Without a draw of its own, so that seeds of before are the same."""
        return 0.004 if len(self.clients) % 3 == 0 else 0.0

    @property
    def calm(self) -> bool:
        """Whether the run has no faults."""
        return not self.faults and self.weather == Weather()


def draw(random: Random, storm: Storm) -> Scenario:
    decode_tokens = random.choice((20, 20, 40))
    # Many requests at once, and faults while they run: prefill nodes then have both kinds of work.
    rush = random.random() < storm.rush
    policy = random.choice((LocalPolicy.STRICT, LocalPolicy.ELASTIC, LocalPolicy.ELASTIC, LocalPolicy.LOCAL))
    if rush:
        policy = LocalPolicy.ELASTIC
    weather = Weather(
        duplicated=random.choice((0.0, 0.0, 0.1)),
        late=random.choice((0.0, 0.0, 0.2)),
        damaged=random.choice((0.0, 0.0, 0.0, 0.05)),
    )
    return Scenario(
        policy=policy,
        # NOTE: a begun request that only a larger prefill node could continue waits for one, and then fails.
        prefill=_sizes(random, tokens=max(decode_tokens, random.choice((20, 40)))),
        decode=_sizes(random, tokens=decode_tokens),
        segment_bytes=random.choice((4, 8, 16, 24, 200)),
        layers_per_group=random.choice((1, NUM_LAYERS, NUM_LAYERS)),
        lease_s=random.choice((0.5, 10.0, 10.0)),
        local_prefill_tokens=random.choice((0, 0, 3)),
        waiting_max=random.choice((1, 4)),
        max_queue_s=random.choice((0.0, 1.0, 1.0)),
        weather=storm.weather or weather,
        clients=_clients(random, 6, within_s=0.03) if rush else _clients(random, random.choice((2, 3, 3, 4))),
        faults=draw_faults(random, storm, within_s=0.06 if rush else 0.3),
        failover_wait_s=random.choice((0.3, 20.0, 20.0)),
        also_decodes=1.0 if rush else random.choice((0.0, 0.5, 1.0, 1.0)),
    )


def _sizes(random: Random, *, tokens: int) -> Sizes:
    block_size = random.choice((2, 4))
    return Sizes(
        num_blocks=tokens // block_size,
        block_size=block_size,
        batch_tokens=random.choice((6, 8, 16)),
        max_waiting=random.choice((0, 0, 1)),
    )


def _clients(random: Random, count: int, *, within_s: float = 0.15) -> tuple[Client, ...]:
    shared = tuple(random.randrange(EOS) for _ in range(12))
    return tuple(_client(random, shared, within_s=within_s) for _ in range(count))


def _client(random: Random, shared: tuple[int, ...], *, within_s: float) -> Client:
    own = tuple(random.randrange(EOS) for _ in range(random.randint(1, 6)))
    common = random.choice((0, 0, 4, 8, 12))
    draw = random.random()
    return Client(
        at_s=within_s * random.random(),
        prompt=shared[:common] + own,
        max_tokens=random.randint(1, 8),
        timeout_s=0.3 * random.random() if draw < 0.1 else 20.0,
        cancel_s=0.2 * random.random() if draw > 0.9 else None,
        priority=random.choice((0, 0, -1, 1)),
        prompt_logprobs=random.choice((None, None, None, 0, 2)),
        ttft_s=random.choice((None, None, 0.01, 0.1)),
        tpot_s=random.choice((None, 0.01)),
        resumes=random.random() < 0.6,
    )
