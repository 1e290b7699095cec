"""A small model of a cluster in virtual time: real placements, nodes that are step costs and queues, Poisson load.

It knows nothing of transports and faults: `tests/simulation` has those.
"""

import heapq
import itertools
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import TypeAlias

from baton.costs import StepCosts, StepWork, chunk_pairs
from baton.types import LocalPolicy, Slo
from gateway.backlog import Backlog
from gateway.placement import Placement, Way, place
from gateway.prediction import prompt_s
from gateway.router import NodeView, Wanted

# Llama-3.1-8B on one H200.
COSTS = StepCosts(
    points=((1, 4.37e-3), (32, 4.5e-3), (128, 5.4e-3), (256, 7.3e-3), (512, 13.4e-3), (1024, 26e-3), (4096, 100e-3)),
    key_s=3.1e-8,
    pair_s=6e-10,
)
Lengths: TypeAlias = Callable[[Random], tuple[int, int]]

REPORT_S = 0.1
ELASTIC = LocalPolicy.ELASTIC
_SEATS = 512
_PREFILL_STEP, _DECODE_STEP = 4096, 2048
_LEAST_SLICE = 16
_HAND_OVER_S = 0.003
_KV_BYTES, _LINK = 131072, 100e9


@dataclass(eq=False)
class Job:
    """One request. `at`: the next prompt token to compute; `stop`: the last one to compute where it is now."""

    arrived_s: float
    prompt: int
    output: int
    at: int = 0
    stop: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    decode: "Node | None" = None
    placement: Placement | None = None

    def meets(self, slo: Slo) -> bool:
        assert slo.ttft_s is not None
        assert slo.tpot_s is not None
        tpot_s = (self.last_s - self.first_s) / max(1, self.output - 1)
        return self.last_s > 0 and self.first_s - self.arrived_s <= slo.ttft_s and tpot_s <= slo.tpot_s


@dataclass(eq=False)
class Node:
    """A node of either role: each step decodes all rows, and computes prompts in what the TPOT leaves."""

    number: int
    step_tokens: int
    tpot_s: float | None
    queue: list[Job] = field(default_factory=list)
    ready: list[Job] = field(default_factory=list)  # their KV is here
    rows: int = 0
    keys: int = 0
    steps: int = 0
    ending: dict[int, list[Job]] = field(default_factory=lambda: defaultdict(list))
    running: bool = False
    busy_s: float = 0.0
    backlog: Backlog = field(default_factory=Backlog)
    reported: NodeView | None = None
    since: int = 0
    picks: int = 0

    def join(self) -> None:
        while self.ready and self.rows < _SEATS:
            job = self.ready.pop(0)
            self.rows += 1
            self.keys += job.prompt
            self.ending[self.steps + job.output - 1].append(job)

    def next_step(self) -> tuple[float, list[tuple[Job, int]]]:
        """Its seconds, and the prompt tokens of each job."""
        self.join()
        budget = self.step_tokens - self.rows
        work = StepWork(self.rows, self.keys)
        slices: list[tuple[Job, int]] = []
        for job in self.queue:
            tokens = min(budget, job.stop - job.at)
            if self.rows and self.tpot_s is not None:
                tokens = min(tokens, self._fitting(work, job, 0.95 * self.tpot_s, least=0 if slices else _LEAST_SLICE))
            if tokens <= 0:
                break
            slices.append((job, tokens))
            budget -= tokens
            pairs = work.pairs + chunk_pairs(job.at, job.at + tokens)
            work = replace(work, prompt_tokens=work.prompt_tokens + tokens, pairs=pairs)
        return COSTS.seconds(work), slices

    def _fitting(self, work: StepWork, job: Job, step_s: float, *, least: int) -> int:
        low, high = 0, self.step_tokens
        for _ in range(9):
            tokens = (low + high + 1) // 2
            pairs = work.pairs + chunk_pairs(job.at, job.at + tokens)
            more = replace(work, prompt_tokens=work.prompt_tokens + tokens, pairs=pairs)
            low, high = (tokens, high) if COSTS.seconds(more) <= step_s else (low, tokens)
        return max(low, least)

    def view(self, peers: frozenset[int], now_s: float) -> NodeView:
        assert self.reported is not None
        view = replace(self.reported, requests_since=self.since, picks=self.picks, ready_peers=peers)
        return view.with_queue(self.backlog.at(now_s))

    def report(self, now_s: float) -> None:
        waiting_s = [COSTS.prompt_s(job.at, job.stop, step_tokens=self.step_tokens) for job in self.queue]
        self.backlog.reported(sum(waiting_s), now_s)
        self.since = 0
        requests = self.rows + len(self.ready) + len(self.queue)
        self.reported = NodeView(
            address=str(self.number),
            incarnation=self.number,
            model=(),
            open=True,
            max_context_tokens=1 << 20,
            block_size=16,
            blocks_free=1 << 20,
            requests=requests,
            tokens_waiting=0,
            ready_peers=frozenset(),
            costs=COSTS,
            decode_rows=self.rows,
            context_tokens=self.keys,
            max_batch_requests=_SEATS,
            max_batch_tokens=self.step_tokens,
            kv_bytes_per_token=_KV_BYTES,
        )


class Model:
    """One run of a load.

    Args:
        prefills, decodes: numbers of nodes.
    """

    def __init__(
        self, jobs: Sequence[Job], *, slo: Slo, prefills: int = 1, decodes: int = 1, policy: LocalPolicy = ELASTIC
    ) -> None:
        self.prefills = [Node(10 + n, _PREFILL_STEP, None) for n in range(prefills)]
        self.decodes = [Node(20 + n, _DECODE_STEP, slo.tpot_s) for n in range(decodes)]
        self.ways: dict[Way, int] = defaultdict(int)
        self._policy, self._slo = policy, slo
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._left = len(jobs)
        for job in jobs:
            self._at(job.arrived_s, partial(self._arrive, job))
        self._report(0.0)

    def run(self, until_s: float) -> None:
        while self._events and self._left and self._events[0][0] < until_s:
            now_s, _, action = heapq.heappop(self._events)
            action(now_s)

    def _at(self, when_s: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), action))

    def _report(self, now_s: float) -> None:
        for node in (*self.prefills, *self.decodes):
            node.report(now_s)
        self._at(now_s + REPORT_S, self._report)

    def _arrive(self, job: Job, now_s: float) -> None:
        numbers = frozenset(node.number for node in (*self.prefills, *self.decodes))
        prefills = [node.view(numbers, now_s) for node in self.prefills]
        decodes = [node.view(numbers, now_s) for node in self.decodes]
        chosen = place(decodes, prefills, Wanted(job.prompt, self._policy, slo=self._slo))
        assert chosen is not None
        self.ways[chosen.way] += 1
        job.placement = chosen
        job.decode = decode = next(node for node in self.decodes if node.number == chosen.decode.incarnation)
        decode.since += 1
        decode.picks += 1
        job.stop = chosen.split_tokens if chosen.way is Way.SPLIT else job.prompt
        if chosen.way is not Way.REMOTE:
            decode.backlog.add(prompt_s(chosen.decode, job.stop % job.prompt, job.prompt), now_s)
        if chosen.way is Way.LOCAL:
            self._enqueue(decode, job, now_s)
            return
        assert chosen.prefill is not None
        prefill = next(node for node in self.prefills if node.number == chosen.prefill.incarnation)
        prefill.backlog.add(prompt_s(chosen.prefill, 0, job.stop), now_s)
        prefill.picks += 1
        self._enqueue(prefill, job, now_s)

    def _enqueue(self, node: Node, job: Job, now_s: float) -> None:
        insort(node.queue, job, key=lambda each: each.arrived_s)  # the earliest deadline first
        self._go(node, now_s)

    def _go(self, node: Node, now_s: float) -> None:
        if node.running:
            return
        node.join()
        if not node.rows and not node.queue:
            return
        seconds, slices = node.next_step()
        node.running = True
        node.busy_s += seconds
        self._at(now_s + seconds, partial(self._step_done, node, slices))

    def _step_done(self, node: Node, slices: list[tuple[Job, int]], now_s: float) -> None:
        node.running = False
        node.steps += 1
        node.keys += node.rows
        for job in node.ending.pop(node.steps, ()):
            job.last_s = now_s
            node.rows -= 1
            node.keys -= job.prompt + job.output - 1
            self._left -= 1
        for job, tokens in slices:
            job.at += tokens
            if job.at < job.stop:
                continue
            node.queue.remove(job)
            assert job.decode is not None
            sent_s = _HAND_OVER_S + job.stop * _KV_BYTES / _LINK
            if job.stop < job.prompt:
                job.stop = job.prompt
                self._at(now_s + sent_s, partial(self._enqueue, job.decode, job))
                continue
            job.first_s = now_s
            self._at(now_s + (0.0 if node is job.decode else sent_s), partial(self._decode, job))
        self._go(node, now_s)

    def _decode(self, job: Job, now_s: float) -> None:
        assert job.decode is not None
        if job.output == 1:
            job.last_s, self._left = now_s, self._left - 1
            return
        job.decode.ready.append(job)
        self._go(job.decode, now_s)


def chat(random: Random) -> tuple[int, int]:
    """Lognormal, mean 250 in and 200 out."""
    return _lognormal(random, 250), _lognormal(random, 200)


def long(random: Random) -> tuple[int, int]:
    return random.randint(4096, 8192), random.randint(128, 256)


def _lognormal(random: Random, mean: float, sigma: float = 0.8) -> int:
    return max(2, min(8192, round(mean * random.lognormvariate(-sigma * sigma / 2, sigma))))


def poisson(lengths: Lengths, rate: float, *, seconds: float, seed: int = 1) -> Iterator[Job]:
    random, now_s = Random(seed), 0.0
    while (now_s := now_s + random.expovariate(rate)) < seconds:
        yield Job(now_s, *lengths(random))


def attainment(
    lengths: Lengths,
    rate: float,
    slo: Slo,
    *,
    seconds: float,
    prefills: int = 1,
    decodes: int = 1,
    policy: LocalPolicy = ELASTIC,
) -> tuple[float, dict[Way, int]]:
    """The part of the requests within their SLO, and how many went which way."""
    jobs = list(poisson(lengths, rate, seconds=seconds))
    model = Model(jobs, slo=slo, prefills=prefills, decodes=decodes, policy=policy)
    model.run(2 * seconds + 20)
    return sum(job.meets(slo) for job in jobs) / len(jobs), model.ways


def goodput(
    lengths: Lengths,
    slo: Slo,
    *,
    high: float,
    seconds: float,
    prefills: int = 1,
    decodes: int = 1,
    policy: LocalPolicy = ELASTIC,
) -> float:
    """The highest rate, up to `high`, at which 90 % of the requests are within their SLO."""
    low = 0.0
    while high - low > 0.03 * high:
        rate = (low + high) / 2
        met, _ = attainment(lengths, rate, slo, seconds=seconds, prefills=prefills, decodes=decodes, policy=policy)
        low, high = (rate, high) if met >= 0.9 else (low, rate)
    return low
