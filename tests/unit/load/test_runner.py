"""Client processes: a plan is shared out among them, and a run that cannot meet its goals ends early."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from baton.load.goals import Goal
from baton.load.probe import probe
from baton.load.records import LoadOutcome
from baton.load.results import Run
from baton.load.runner import Clients, RunOptions
from baton.load.target import Server, Target
from baton.load.worker import WorkerProgress
from baton.load.workload import PlannedRequest
from tests.unit.load.stand_in import StandIn, standing_in

OPTIONS = RunOptions("a test", bound_s=60.0)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with standing_in(StandIn(running_usage=True)) as stand_in:
        yield await probe(Target.parse(stand_in.url))


async def test_processes_share_a_plan_and_one_goes_on_after_a_run_that_could_not_be_good(server: Server) -> None:
    planned = [PlannedRequest(index, 0.0, 20, 3, counted=index >= 4) for index in range(20)]
    late = PlannedRequest(20, 600.0, 20, 3)
    seen: list[WorkerProgress] = []

    def runs() -> tuple[Run, Run, Run]:
        with Clients(2) as clients:
            first = clients.run(server, planned, OPTIONS, rate=10.0, seed=0, on_progress=seen.append)
            # Without its goal this run would take ten minutes. 3 of 17 counted requests may miss, and 16 do.
            hopeless = Goal(e2e_s=1e-9, share=0.8)
            stopped = clients.run(server, [*planned, late], OPTIONS, rate=10.0, seed=0, goals=[hopeless])
            return first, stopped, clients.run(server, planned, OPTIONS, rate=10.0, seed=0, goals=[Goal(e2e_s=60.0)])

    for_all, stopped, again = await asyncio.to_thread(runs)
    assert [record.index for record in for_all.records] == list(range(20))
    assert len(for_all.counted) == 16
    assert {record.outcome for record in for_all.records} == {LoadOutcome.OK}
    assert not for_all.client.was_the_limit
    assert for_all.client.processes == 2
    assert seen
    assert len(stopped.records) == 20
    assert stopped.good([Goal(e2e_s=1e-9)]) == [0]
    assert len(again.records) == 20
    ids = [{record.request_id for record in run.records} for run in (for_all, stopped, again)]
    assert not ids[0] & ids[1]  # other contents in each run
    assert not ids[1] & ids[2]


def test_progress_of_processes_adds_up() -> None:
    assert WorkerProgress(3, 2, 1, (1, 0)) + WorkerProgress(1, 1, 0) + WorkerProgress(
        0, 0, 0, (1, 1)
    ) == WorkerProgress(4, 3, 1, (2, 1))
