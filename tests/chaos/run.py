"""One run: the answers of one process, then a cluster with a load, a storm, and the calm after it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from baton.client.client import AsyncClient
from tests.chaos.checker import Violation, check
from tests.chaos.cluster import Cluster, cluster, one_process
from tests.chaos.history import Calm, End, History, NotReleased, NotServed, Over, PeersLeft
from tests.chaos.load import Asker, answers_of, send_load
from tests.chaos.scenario import CLIENT, Scenario
from tests.chaos.storm import Storm
from tests.chaos.works import Answer, Work

# Long enough for any machine: only what hangs takes that long.
LIMIT_S = 300.0
_MEASURE_S = 5.0
_POLL_S = 0.1


@dataclass(frozen=True)
class Outcome:
    """A run that is over.

    Attributes:
        answers: of one process, by the name of the work.
    """

    scenario: Scenario
    history: History
    answers: Mapping[str, tuple[Answer, ...]]
    violations: tuple[Violation, ...]


async def run(scenario: Scenario, logs: Path, *, progress: Callable[[str, float], None] | None = None) -> Outcome:
    """Runs a scenario and judges it.

    Args:
        logs: an empty directory for the processes' output.
        progress: called with what is done now, and with the seconds of the storm that have passed.
    """
    show = progress or (lambda stage, seconds: None)
    show("one process", 0.0)
    async with one_process(logs) as address:
        answers = await answers_of(address, scenario.works)
    works = [work for work in scenario.works if work.name in answers]
    history = History()
    show("starting", 0.0)
    async with cluster(scenario, history, logs) as made:
        watch = asyncio.create_task(made.watch())
        try:
            await _live(scenario, made, works, show)
        finally:
            watch.cancel()
            await asyncio.wait([watch])
        show("ending", scenario.seconds)
    violations = check(history.events, answers, allowed=scenario.allowed)
    return Outcome(scenario, history, answers, tuple(violations))


async def _live(scenario: Scenario, made: Cluster, works: list[Work], show: Callable[[str, float], None]) -> None:
    asker, history = Asker(made.history), made.history
    addresses = [made.links[f"{CLIENT}-{gateway}"].address for gateway in scenario.gateways]
    await _serve(asker, addresses, works)  # what is made on first use is there before anything is measured
    made.measure()
    over = asyncio.Event()
    load = asyncio.create_task(
        send_load(asker, addresses, works, scenario.load, seed=scenario.seed, until=over), name="load"
    )
    timing = asyncio.create_task(_time(scenario.seconds, over, made, show))
    await Storm(made, over).rage(scenario.faults)
    await timing
    show("calm", scenario.seconds)
    await made.until_ready(*made.members)
    history.add(Calm(history.now_s()))
    await asyncio.wait([load], timeout=LIMIT_S)
    for task in list(asker.running.values()):  # they hang
        task.cancel()
    await asyncio.wait([load])
    await _serve(asker, addresses, works)
    await _judge_what_is_left(made)
    made.measure()
    history.add(Over(history.now_s()))


async def _time(seconds: float, over: asyncio.Event, made: Cluster, show: Callable[[str, float], None]) -> None:
    """Measures, and ends the storm."""
    begun_s = time.monotonic()
    while (passed_s := time.monotonic() - begun_s) < seconds:
        show("storm", passed_s)
        await asyncio.sleep(min(_MEASURE_S, seconds - passed_s))
        made.measure()
    over.set()


async def _serve(asker: Asker, addresses: list[str], works: list[Work]) -> None:
    """Each gateway serves every work. Where nodes are still being found again, it is asked again."""
    for address in addresses:
        async with AsyncClient(address) as client:
            asked = (_until_empty(partial(_why_not, asker, client, work)) for work in works)
            for work, why in zip(works, await asyncio.gather(*asked), strict=True):
                if why:
                    asker.history.add(NotServed(asker.history.now_s(), address, work.name, why))


async def _judge_what_is_left(made: Cluster) -> None:
    history = made.history
    for node in made.nodes():
        if what := await _until_empty(partial(made.not_released, node.name)):
            history.add(NotReleased(history.now_s(), node.name, what))
    for node in made.nodes():
        if what := await _until_empty(partial(made.peers_left, node.name)):
            history.add(PeersLeft(history.now_s(), node.name, what))


async def _why_not(asker: Asker, client: AsyncClient, work: Work) -> str:
    ended = await asker.ask(client, work)
    return "" if ended.how is End.FINISHED else f"{ended.how.value} {ended.detail}"


async def _until_empty(what: Callable[[], Awaitable[str]]) -> str:
    """Asks until the answer is empty; returns the last answer after the limit."""
    until_s = time.monotonic() + LIMIT_S
    while True:
        answer = await what()
        if not answer or time.monotonic() > until_s:
            return answer
        await asyncio.sleep(_POLL_S)
