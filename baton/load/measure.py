"""Makes the runs of a command in order: one, rounds over several targets, or searches for the highest rate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.load.goals import Goal
from baton.load.results import Found, Run
from baton.load.runner import Clients, OnProgress, RunOptions
from baton.load.search import RateSearch
from baton.load.target import Server
from baton.load.workload import LengthSpan, PlannedRequest, Workload

# Makes the display of one run: its title and number of requests to a function that is called with the progress.
Display = Callable[[str, int], OnProgress]


@dataclass(frozen=True)
class Measurement:
    """The settings that all runs of a command share.

    Attributes:
        stop: once it returns True, the current run ends early and no further one begins.
    """

    clients: Clients
    workload: Workload
    span: LengthSpan
    options: RunOptions
    display: Display
    seed: int
    stop: Callable[[], bool] = lambda: False

    def rounds(self, servers: Sequence[Server], rate: float, count: int) -> list[Run]:
        """Makes `count` runs of each server.

        The servers take turns, and another one goes first in each round, so that a drift of the machine affects all of
        them alike. In a round all get requests at the same times, of the same lengths.
        """
        runs = []
        for number in range(count):
            turn = number % len(servers)
            for server in (*servers[turn:], *servers[:turn]):
                if self.stop():
                    break
                title = f"{server.target.label} {rate:g}/s" + (f", round {number + 1} of {count}" if count > 1 else "")
                runs.append(self._run(server, rate, self.seed + number, title)[0])
        order = [server.target.label for server in servers]
        return sorted(runs, key=lambda run: order.index(run.label))

    def search(
        self, servers: Sequence[Server], goals: Sequence[Goal], *, start: float, precision: float, runs_max: int
    ) -> tuple[list[Run], list[Found]]:
        """Searches the highest rate that meets each goal, for each server. The servers take turns.

        Only runs at rates that may be the answer keep their records.
        """
        searches = [
            RateSearch.of([goal.share for goal in goals], start=start, precision=precision, runs_max=runs_max)
            for _ in servers
        ]
        runs: list[list[Run]] = [[] for _ in servers]
        while not self.stop() and any(search.next_rate() is not None for search in searches):
            for server, search, made in zip(servers, searches, runs, strict=True):
                rate = search.next_rate()
                if rate is None or self.stop():
                    continue
                # A goal that a lower rate has missed already learns nothing from this one.
                open_goals = [goal for goal, each in zip(goals, search.goals, strict=True) if rate < each.high]
                title = f"{server.target.label} {rate:.3g}/s"
                run, total = self._run(server, rate, self.seed + len(made), title, open_goals)
                if self.stop():  # the run has only a part of its requests
                    made.append(run)
                    break
                search.observe(rate, run.good(goals), total)
                made.append(run)
                best = {of_goal.low for of_goal in search.goals}
                made[:] = [each if each.rate in best or each.kept else each.without_records(goals) for each in made]
        found = [
            _found(server, search, goals, made) for server, search, made in zip(servers, searches, runs, strict=True)
        ]
        return [run for made in runs for run in made], [each for of_one in found for each in of_one]

    def _run(
        self, server: Server, rate: float, seed: int, title: str, open_goals: Sequence[Goal] = ()
    ) -> tuple[Run, int]:
        """Makes one run. Returns it with the number of planned requests that count, because a run that ends early has
        not sent them all."""
        planned: list[PlannedRequest] = self.workload.plan(rate, self.span, seed)
        title += f" for {planned[-1].at_s:.0f} s"
        run = self.clients.run(
            server, planned, self.options, rate=rate, seed=seed, goals=open_goals,
            on_progress=self.display(title, len(planned)), stop=self.stop,
        )  # fmt: skip
        return run, sum(request.counted for request in planned)


def _found(server: Server, search: RateSearch, goals: Sequence[Goal], runs: Sequence[Run]) -> list[Found]:
    found = []
    limited = sum(run.client.was_the_limit for run in runs)
    for goal, of_goal in zip(goals, search.goals, strict=True):
        rate = of_goal.low
        _, good, total = of_goal.counts.get(rate, (0, 0, 0))
        found.append(
            Found(
                label=server.target.label,
                goal=goal,
                rate=rate,
                good_share=good / total if total else 0.0,
                requests=total,
                complete=of_goal.next_rate() is None,
                at_most=of_goal.high != float("inf"),
                client_limited=limited,
            )
        )
    return found
