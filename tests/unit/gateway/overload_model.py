"""A gateway's admission in front of a prefill and a decode node, in virtual time: nodes with known step costs, reports
ten times a second, and clients that do not wait for answers."""

import heapq
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from baton.core.costs import StepCosts, StepWork
from baton.core.errors import Overloaded
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.serving.admission import Admission
from baton.gateway.serving.admission_pace import AdmissionRequest
from baton.gateway.serving.node_capacity import CapacityReader, ClusterCapacity

REPORT_S = 0.1
MEASURE_S = 0.25
PROMPT_TOKENS = 64


@dataclass
class Client:
    """Requests at random times, `rate` a second, from `after_s` on. `at_once`: instead, it keeps so many open."""

    name: str
    rate: float = 0.0
    at_once: int = 0
    output_tokens: int = 32
    deadline_s: float | None = 6.0
    after_s: float = 0.0


@dataclass
class Result:
    good: list[float] = field(default_factory=list)  # seconds of requests that were finished in time
    late: int = 0
    refused: list[float] = field(default_factory=list)  # seconds until the refusal
    hints: list[float] = field(default_factory=list)


@dataclass
class _Job:
    asked: AdmissionRequest
    client: Client
    started_s: float = 0.0
    first_s: float = 0.0
    left: int = 0
    seen_s: float = 0.0
    seen_left: int = 0


class Nodes:
    """One prefill node, which computes one prompt after the other, and one decode node; others may use them too.

    Args:
        reported: what the decode node believes its steps to cost.
        mixed: the decode node computes the prompts, one in a step.
    """

    def __init__(
        self, costs: StepCosts, *, prompt_s: float, seats: int, reported: StepCosts | None = None, mixed: bool = False
    ) -> None:
        self.costs = costs
        self.reported = reported or costs
        self.mixed = mixed
        self.prompt_s = prompt_s
        self.seats = seats
        self.prompts: list[_Job] = []
        self.ready: list[_Job] = []
        self.rows: list[_Job] = []

    def view(self, sent: int, reported: tuple[int, int, int, float]) -> NodeView:
        requests, rows, context, _ = reported
        return NodeView(
            "d", 1, "", True, 4096, 16, 160_000, requests, 0, frozenset(), requests_since=sent, costs=self.reported,
            decode_rows=rows, context_tokens=context, max_batch_requests=self.seats,
        )  # fmt: skip

    def report(self) -> tuple[int, int, int, float]:
        here = len(self.ready) + len(self.rows) + (len(self.prompts) if self.mixed else 0)
        return here, len(self.rows), 80 * len(self.rows), len(self.prompts) * self.prompt_s

    def step_s(self) -> float:
        seconds = self.costs.seconds(StepWork(len(self.rows), 80 * len(self.rows))) if self.rows else 0.005
        return seconds + (self.prompt_s if self.mixed and self.prompts else 0.0)


class World:
    """Runs clients against `gateways` gateways for `duration_s`. `admits`: False: every request starts at once."""

    def __init__(self, nodes: Nodes, *, gateways: int = 1, admits: bool = True, queue_s: float = 10.0) -> None:
        self.nodes = nodes
        self.now_s = 0.0
        self._admits = admits
        self._admissions = [Admission(most=1024, queue_s=queue_s) for _ in range(gateways)]
        self._reader = CapacityReader()
        self._reported = nodes.report()
        self._sent = [0] * gateways
        self._waiting: list[dict[int, _Job]] = [{} for _ in range(gateways)]
        self._here = [0] * gateways
        self._events: list[tuple[float, int, str, object]] = []
        self._order = count()
        self._keys = count(1)
        self._rng = random.Random(1)
        self._gateway_of: dict[int, int] = {}
        self.results: dict[str, Result] = {}

    def run(self, clients: Iterable[Client], duration_s: float) -> dict[str, Result]:
        self.results = {client.name: Result() for client in clients}
        for client in clients:
            for _ in range(client.at_once or 1):
                first_s = self._rng.expovariate(client.rate) if client.rate else 0.01
                self._at(client.after_s + first_s, "arrive", client)
        for kind, after_s in (("report", REPORT_S), ("step", 0.0), ("look", 0.02), ("measure", MEASURE_S)):
            self._at(after_s, kind, None)
        if not self.nodes.mixed:
            self._at(0.0, "prompt", None)
        while self._events:
            self.now_s, _, kind, what = heapq.heappop(self._events)
            if self.now_s > duration_s:
                break
            getattr(self, f"_on_{kind}")(what)
        return self.results

    def _at(self, after_s: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (self.now_s + after_s, next(self._order), kind, what))

    def _capacity(self, gateway: int) -> ClusterCapacity:
        view = self.nodes.view(self._sent[gateway], self._reported)
        wait_s = self._reported[3] + self._sent[gateway] * self.nodes.prompt_s
        prompts = 0 if self.nodes.mixed else round(self._reported[3] / self.nodes.prompt_s)
        prefill = NodeView("p", 2, "", True, 4096, 16, 160_000, prompts, 0, frozenset(), costs=self.nodes.costs)
        if self.nodes.mixed:
            return self._reader.of([view.with_queue(wait_s)], [])
        return self._reader.of([view], [prefill.with_queue(wait_s)])

    # ---- events

    def _on_arrive(self, client: Client) -> None:
        if client.rate:
            self._at(self._rng.expovariate(client.rate), "arrive", client)
        deadline_s = None if client.deadline_s is None else self.now_s + client.deadline_s
        tokens = client.output_tokens
        asked = AdmissionRequest(
            next(self._keys), client.name, PROMPT_TOKENS, tokens, 0, self.now_s, deadline_s=deadline_s
        )
        gateway = self._gateway_of[asked.key] = asked.key % len(self._admissions)
        job, admission = _Job(asked, client, left=tokens), self._admissions[gateway]
        if not self._admits:
            self._start(gateway, job)
            return
        try:
            admission.enter(client.name, 1, self._here[gateway], self.now_s)
        except Overloaded as error:
            self._refused(job, error)
            return
        self._here[gateway] += 1
        try:
            if admission.offer(asked, self._capacity(gateway), self.now_s):
                self._start(gateway, job)
            else:
                self._waiting[gateway][asked.key] = job
                self._look(gateway)
        except Overloaded as error:
            self._leave(job)
            self._refused(job, error)

    def _on_look(self, _: object) -> None:
        for gateway in range(len(self._admissions)):
            self._look(gateway)
        self._at(0.02, "look", None)

    def _look(self, gateway: int) -> None:
        admission = self._admissions[gateway]
        while True:
            key = admission.take(self._capacity(gateway), self.now_s)
            if key is not None:
                self._start(gateway, self._waiting[gateway].pop(key))
                continue
            refused = admission.shed(self._capacity(gateway), self.now_s)
            for each in refused:
                job = self._waiting[gateway].pop(each.key)
                self._leave(job)
                self._refused(job, each.error)
            if not refused:
                return

    def _on_measure(self, _: object) -> None:
        for gateway, admission in enumerate(self._admissions):
            for job in self.nodes.rows:
                if job.first_s and self._gateway_of[job.asked.key] == gateway:
                    self._progressed(job)
            admission.progressed(0.0, 0, self._capacity(gateway), self.now_s)
        self._at(MEASURE_S, "measure", None)

    def _on_report(self, _: object) -> None:
        self._reported, self._sent = self.nodes.report(), [0] * len(self._admissions)
        self._at(REPORT_S, "report", None)

    def _on_prompt(self, job: _Job | None) -> None:
        nodes = self.nodes
        if job is not None:
            nodes.prompts.remove(job)
            if not self._given_up(job):
                nodes.ready.append(job)
        self._at(nodes.prompt_s, "prompt", nodes.prompts[0] if nodes.prompts else None)

    def _on_step(self, rows: list[_Job] | None) -> None:
        nodes = self.nodes
        for job in rows or ():
            job.left -= 1
            if job.first_s == 0.0:
                job.first_s = self.now_s
                gateway = self._gateway_of[job.asked.key]
                waited_s, capacity = self.now_s - job.started_s, self._capacity(gateway)
                self._admissions[gateway].pace.first_token(waited_s, PROMPT_TOKENS, capacity, self.now_s)
            if not job.left:
                self._ended(job)
        nodes.rows = [job for job in nodes.rows if job.left and not self._given_up(job)]
        if nodes.mixed and nodes.prompts and (job := nodes.prompts.pop(0)) and not self._given_up(job):
            nodes.ready.append(job)
        while nodes.ready and len(nodes.rows) < nodes.seats:
            nodes.rows.append(nodes.ready.pop(0))
        self._at(nodes.step_s(), "step", list(nodes.rows))

    # ----

    def _start(self, gateway: int, job: _Job) -> None:
        job.started_s = self.now_s
        self._sent[gateway] += 1
        self.nodes.prompts.append(job)

    def _given_up(self, job: _Job) -> bool:
        if job.asked.deadline_s is None or self.now_s < job.asked.deadline_s:
            return False
        self.results[job.client.name].late += 1
        if job.first_s:
            self._measured(job, whole=False)
        self._close(job)
        return True

    def _ended(self, job: _Job) -> None:
        if job.asked.deadline_s is None or self.now_s <= job.asked.deadline_s:
            self.results[job.client.name].good.append(self.now_s - job.asked.arrived_s)
        else:
            self.results[job.client.name].late += 1
        self._measured(job, whole=True)
        self._close(job)

    def _progressed(self, job: _Job) -> None:
        gateway = self._gateway_of[job.asked.key]
        seconds, tokens = (
            self.now_s - (job.seen_s or job.first_s),
            (job.seen_left or job.client.output_tokens) - job.left,
        )
        self._admissions[gateway].progressed(seconds, tokens, self._capacity(gateway), self.now_s)
        job.seen_s, job.seen_left = self.now_s, job.left

    def _measured(self, job: _Job, *, whole: bool) -> None:
        gateway, most = self._gateway_of[job.asked.key], job.client.output_tokens
        self._progressed(job)
        self._admissions[gateway].pace.ended(most - job.left, most, whole=whole)

    def _close(self, job: _Job) -> None:
        if self._admits:
            self._leave(job)
            self._admissions[self._gateway_of[job.asked.key]].settle(job.asked, job.client.output_tokens - job.left)
        self._again(job)

    def _leave(self, job: _Job) -> None:
        gateway = self._gateway_of[job.asked.key]
        self._here[gateway] -= 1
        self._admissions[gateway].leave(job.client.name, 1)

    def _refused(self, job: _Job, error: Overloaded) -> None:
        result = self.results[job.client.name]
        result.refused.append(self.now_s - job.asked.arrived_s)
        assert error.retry_after_s is not None, "every refusal has a hint"
        result.hints.append(error.retry_after_s)
        self._again(job, 0.2)

    def _again(self, job: _Job, after_s: float = 0.02) -> None:
        if job.client.at_once:
            self._at(after_s, "arrive", job.client)
