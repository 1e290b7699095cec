"""The outcome of one simulated run: its requests, and their latencies as goals and reports read them. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from baton.load.goals import Goal
from baton.planner.job import PlanJob


@dataclass
class SimulatedOutcome:
    """The outcome of a run; `jobs` are in the order of arrival."""

    goal: Goal
    jobs: list[PlanJob]
    seconds: float
    prefill_busy: float  # mean share of the time in which prefill nodes computed
    decode_busy: float

    @property
    def counted(self) -> list[PlanJob]:
        return [job for job in self.jobs if job.counted]

    def share(self, goal: Goal | None = None) -> float:
        """The share of the counted requests that met the goal; None is the run's own goal."""
        counted, goal = self.counted, goal or self.goal
        return sum(job.meets(goal) for job in counted) / len(counted)

    def ttft_s(self, share: float) -> float:
        return _quantile([job.ttft_s for job in self.counted], share)

    @property
    def mean_ttft_s(self) -> float:
        return sum(job.ttft_s for job in self.counted) / len(self.counted)

    @property
    def mean_tpot_s(self) -> float:
        return sum(job.tpot_s for job in self.counted) / len(self.counted)

    def tpot_s(self, share: float) -> float:
        return _quantile([job.tpot_s for job in self.counted], share)

    def hit_share(self, jobs: Iterable[PlanJob] | None = None) -> float:
        """The share of the prompts' pieces that came from prefix caches; 0 for a load without prefixes."""
        chosen = [job for job in (self.jobs if jobs is None else jobs) if job.prefix_ids]
        # A prompt's last token is computed in any case, also where all of its pieces are cached.
        hits = sum(-(-job.cached // job.prefix_tokens) for job in chosen)
        return hits / max(1, sum(len(job.prefix_ids) for job in chosen))


def _quantile(values: list[float], share: float) -> float:
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0
