"""Simulates one node of either role: a queue of prompts, decoding rows, and steps as long as `StepCosts` predicts.

Steps that only decode are alike until a request ends or arrives, so they are simulated together
(`baton.planner.step_run`). A step in which draft tokens give each request several tokens is simulated as that many
steps, which share its time. Pure.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

from baton.core.costs import StepWork, chunk_pairs
from baton.core.decode_pace import PLAIN_PACE, DecodePace
from baton.core.types import DEFAULT_OBJECTIVE, Objective, Slo, first_token_due_s
from baton.engine.scheduling.slices import DEFAULT_TTFT_S, Slicer, StepBound, StreamBound
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.fleet.second_token import SecondTokenDelay, hold_s, longest_gap_s
from baton.planner.host import NO_HOST_TIME, HostTimes
from baton.planner.job import PlanJob
from baton.planner.node_spec import NodeSpec
from baton.planner.prefix_cache import SimulatedChanges, SimulatedPrefixCache
from baton.planner.step_run import StepRun


class SimulatedNode:
    """A node whose steps take the time that its costs predict.

    Attributes:
        queue: requests whose prompts are computed here, in the order of their due times.
        ready: requests whose KV is here and that wait for a seat.
        blocked: requests that wait for room in the cache.
        runs: past runs of steps, each with their number and the mean gap between tokens of different steps.
        version: number of the current run; an event of an older run is void.
        busy_s: time of all steps that ended.
    """

    def __init__(
        self,
        number: int,
        spec: NodeSpec,
        slo: Slo,
        prefix_tokens: int,
        host: HostTimes = NO_HOST_TIME,
        objective: Objective = DEFAULT_OBJECTIVE,
    ) -> None:
        self.number = number
        self.spec = spec
        self._host = host
        self.queue: list[tuple[float, int, PlanJob]] = []
        self.ready: deque[PlanJob] = deque()
        self.blocked: deque[PlanJob] = deque()
        self.runs: list[tuple[int, float]] = []
        self.version = 0
        self.busy_s = 0.0
        self.kv_used = 0
        self.link_free_s = 0.0
        self.cache = SimulatedPrefixCache(spec.kv_tokens // max(1, prefix_tokens))
        self.host = SimulatedPrefixCache(spec.host_tokens // max(1, prefix_tokens))
        self.backlog_s = 0.0  # predicted time of the prompts in its queue
        self.requests = 0
        self._streams = (StreamBound(slo.tpot_s, objective.gap_factor),)
        self._slo, self._objective = slo, objective
        self._second_token = SecondTokenDelay()
        self._slicer = Slicer()
        self._rows = 0
        self._keys = 0
        self._steps = 0
        self._ending: list[tuple[int, int, PlanJob]] = []
        self._run: StepRun | None = None
        self._ended_s = -math.inf
        self._order = 0

    def store(self, prefix_ids: Sequence[int]) -> SimulatedChanges:
        """Puts the beginning of a prompt into the cache, and into host memory where there is some."""
        stored, removed, _ = self.cache.use(prefix_ids)
        if not self.spec.host_tokens:
            return SimulatedChanges(stored, removed)
        left = dict.fromkeys((*removed, *self.host.use(prefix_ids).removed))
        gone = [each for each in left if each not in self.cache and each not in self.host]
        return SimulatedChanges(stored, gone, [each for each in left if each in self.host and each not in self.cache])

    def count_kept(self, prefix_ids: Sequence[int]) -> int:
        """Number of leading ids that are in the cache or in host memory."""
        for place, prefix_id in enumerate(prefix_ids):
            if prefix_id not in self.cache and prefix_id not in self.host:
                return place
        return len(prefix_ids)

    @property
    def running(self) -> tuple[int, float]:
        """The decoding rows and the time of the step that runs."""
        return self._rows, 1.0 if self._run is None else self._run.first_s

    def keys_at(self, now_s: float) -> int:
        """The keys that the next token of all rows reads."""
        run = self._run
        return self._keys + (self._rows * run.ended_by(now_s) if run is not None and not run.slices else 0)

    def busy_until(self, now_s: float) -> float:
        """The time of its steps so far."""
        return self.busy_s + (0.0 if self._run is None else now_s - self._run.started_s)

    def prompt_s(self, job: PlanJob) -> float:
        return self.spec.costs.prompt_s(job.at, job.stop, step_tokens=self.spec.step_tokens)

    def enqueue(self, job: PlanJob, now_s: float) -> None:
        """Queues a prompt, or a part of it, to be computed here."""
        job.queued_s, job.started, job.begun = now_s, False, False
        self._order += 1
        self.backlog_s += self.prompt_s(job)
        insort(self.queue, (min(job.due_s, now_s + DEFAULT_TTFT_S), self._order, job))

    def hold_first_token(self, job: PlanJob) -> None:
        """Holds the first token of a hand-over to this node back for the second one, as a gateway does."""
        now_s = job.first_s
        plain_s = self.spec.costs.seconds(StepWork(self._rows + 1, self.keys_at(now_s) + job.prompt))
        gap_s = longest_gap_s(plain_s, self._slo, self._objective)
        waited_s = now_s - job.arrived_s
        job.held_until_s = now_s + hold_s(self._second_token.at(now_s), gap_s, self._slo, waited_s=waited_s)

    def receive(self, job: PlanJob, now_s: float) -> None:
        """Queues a request for a seat, now that the KV of its prompt is here."""
        job.ready_s = now_s
        self.ready.append(job)

    def arrival(self, now_s: float) -> float | None:
        """Begins a run for an arrival, or ends the current one early. Returns when that run ends, or None if nothing
        changes."""
        run = self._run
        if run is None:
            return self.begin(now_s)
        if run.slices:
            return None
        count = min(run.count, run.ended_by(now_s + self._host.lead_s) + 1)
        if count == run.count:
            return None
        run.count = count
        self.version += 1
        return run.started_s + run.seconds(count)

    def begin(self, now_s: float) -> float | None:
        """Starts the next steps. Returns when they end, or None if there is nothing to do."""
        assert self._run is None
        launched_s = self._launched_s(now_s)
        joined = []
        while self.ready and self._rows < self.spec.seats and self.ready[0].ready_s <= launched_s:
            joined.append(self.ready.popleft())
            self._join(joined[-1])
        work = StepWork(self._rows, self._keys)
        slices = self._slices(work, launched_s) if self.queue else []
        if slices:
            host_s = 0.0
            for job, tokens in slices:
                host_s += self._host.later_token_s * tokens if job.at else 0.0
                pairs = work.pairs + chunk_pairs(job.at, job.at + tokens)
                work = StepWork(work.decode_rows, work.keys, work.prompt_tokens + tokens, pairs)
            host_s += self._host.mixed_s if work.decode_rows else 0.0
            self._run = StepRun(now_s, 1, max(self.spec.seconds(work) + host_s, self._host_s), 0.0, slices)
        elif self._rows:
            # While prompts wait for a step with room for a slice, each step is decided anew.
            count = 1 if self.queue or self.ready else self._ending[0][0] - self._steps
            step = self.spec.drafts.step(self.spec.costs, work, seats=self.spec.seats)
            rise_s = step.rise_s if step.seconds > self._host_s else 0.0
            each_s = max(step.seconds, self._host_s) / step.tokens
            self._run = StepRun(now_s, count, each_s, rise_s / step.tokens, [], step.tokens)
        else:
            return None
        for job in joined:
            second_s = now_s + self._run.first_s
            if job.held_until_s:  # its first token was held, or might have been
                self._second_token.add(second_s - job.first_s, now_s)
            job.second_token_came(second_s)
        self.version += 1
        return now_s + self._run.seconds(self._run.count)

    def end(self, now_s: float) -> tuple[list[PlanJob], list[tuple[PlanJob, int]]]:
        """Ends the run. Returns the requests that are complete, and the prompt tokens that were computed."""
        run = self._run
        assert run is not None
        self._run, self._ended_s = None, now_s
        seconds = run.seconds(run.count)
        self.busy_s += seconds
        self.runs.append((run.count, run.tokens * seconds / run.count))
        self._steps += run.count
        self._keys += run.count * self._rows
        ended = []
        while self._ending and self._ending[0][0] == self._steps:
            _, _, job = heappop(self._ending)
            job.last_s, job.last_run = now_s, len(self.runs) - 1
            self._rows -= 1
            self._keys -= job.prompt + job.output
            ended.append(job)
        for job, tokens in run.slices:
            before_s = self.prompt_s(job)
            job.at += tokens
            self.backlog_s += (self.prompt_s(job) if job.at < job.stop else 0.0) - before_s
        if run.slices and any(job.at >= job.stop for job, _ in run.slices):
            self.queue = [entry for entry in self.queue if entry[2].at < entry[2].stop]
        if not self.queue:
            self.backlog_s = 0.0
        return ended, run.slices

    def report(self, now_s: float, peers: frozenset[int], speeds: Mapping[int, float]) -> NodeView:
        """The node's state, as it would report it."""
        spec = self.spec
        return NodeView(
            str(self.number),
            self.number,
            "",
            open=True,
            max_context_tokens=1 << 30,
            block_size=spec.block_size,
            room_tokens=max(0, spec.kv_tokens - self.kv_used),
            requests=self.requests,
            tokens_waiting=sum(job.stop - job.at for _, _, job in self.queue),
            ready_peers=peers,
            costs=spec.view_costs,
            backlog_s=spec.reports_factor * self.backlog_s,
            decode_rows=self._rows,
            context_tokens=self.keys_at(now_s),
            max_batch_requests=spec.seats,
            max_batch_tokens=spec.step_tokens,
            kv_bytes_per_token=spec.kv_bytes_per_token,
            state_bytes=spec.state_bytes,
            peer_bytes_per_s=speeds,
            load_token_s=spec.load_token_s,
            pull_costs=spec.pull_costs,
            second_token_s=self._second_token.at(now_s),
            pace=self._pace(now_s) if spec.drafts.drafted else None,
        )

    # ----

    @property
    def _host_s(self) -> float:
        """Host time of the next step."""
        return self._host.row_s * self._rows

    def _launched_s(self, now_s: float) -> float:
        """When the step that starts now was launched: before the end of the last one, if there was anything to run."""
        launched_s = now_s - self._host.lead_s
        if now_s != self._ended_s or not self._host.lead_s:
            return now_s
        known = self._rows or any(job.queued_s <= launched_s for _, _, job in self.queue)
        return launched_s if known or any(job.ready_s <= launched_s for job in self.ready) else now_s

    def _pace(self, now_s: float) -> DecodePace:
        """The pace of its next decode step without prompts. A node reports means over its latest steps."""
        if not self._rows:
            return PLAIN_PACE
        spec, work = self.spec, StepWork(self._rows, self.keys_at(now_s))
        step = spec.drafts.step(spec.costs, work, seats=spec.seats)
        return DecodePace(step.seconds / spec.costs.seconds(work), step.tokens)

    def _join(self, job: PlanJob) -> None:
        self._rows += 1
        self._keys += job.prompt + 1
        self._order += 1
        job.runs, job.first_run = self.runs, len(self.runs)
        heappush(self._ending, (self._steps + job.output - 1, self._order, job))

    def _slices(self, work: StepWork, now_s: float) -> list[tuple[PlanJob, int]]:
        """The prompt tokens of the next step, by request; requests that came after `now_s` get none."""
        self._move_late_prompts_back(now_s)
        budget = self.spec.step_tokens - self._rows
        bound = self._bound(work, now_s)
        slices: list[tuple[PlanJob, int]] = []
        for _, _, job in self.queue:
            if job.queued_s > now_s:
                continue
            if not job.started:
                self._start(job)
            tokens = min(budget, job.stop - job.at)
            if tokens > 0 and bound is not None:
                tokens = bound.tokens(work, job.at, job.at + tokens)
            if tokens <= 0:
                break
            job.begun = True
            slices.append((job, tokens))
            budget -= tokens
            pairs = work.pairs + chunk_pairs(job.at, job.at + tokens)
            work = StepWork(work.decode_rows, work.keys, work.prompt_tokens + tokens, pairs)
        self._slicer.launched(skipped=not slices)
        return slices

    def _start(self, job: PlanJob) -> None:
        """Starts to compute a prompt, and skips what the cache has of it."""
        job.started = True
        cached = min(self.cache.count(job.prefix_ids) * job.prefix_tokens, job.prompt - 1)
        if job.at == 0:
            job.cached = cached
        if cached > job.at:
            before_s = self.prompt_s(job)
            job.at = min(cached, job.stop - 1)
            self.backlog_s += self.prompt_s(job) - before_s

    def _move_late_prompts_back(self, now_s: float) -> None:
        """Moves prompts that cannot meet their deadline after those that can, for a bounded time."""
        while self.queue:
            due_s, order, job = self.queue[0]
            patient_s = job.queued_s + DEFAULT_TTFT_S
            if due_s >= patient_s or now_s + self.prompt_s(job) <= due_s:
                return
            del self.queue[0]
            insort(self.queue, (patient_s, order, job))

    def _bound(self, work: StepWork, now_s: float) -> StepBound | None:
        """The bound on the next step's time. Returns None if there is none."""
        if not self.spec.bounded:
            return None
        waiting = next((job for _, _, job in self.queue if not job.begun and job.queued_s <= now_s), None)
        overdue = 0.0
        if waiting is not None:
            alone_s = self.spec.costs.prompt_s(waiting.at, waiting.stop, step_tokens=self.spec.step_tokens)
            overdue = (now_s - waiting.queued_s) / first_token_due_s(alone_s, self._objective.ttft_factor)
        return self._slicer.bound(self.spec, work, self._streams, overdue=overdue)
