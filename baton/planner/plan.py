"""Searches the cluster that a load needs: number and roles of nodes, step sizes, and the goodput to expect. Pure.

Every option is simulated with the gateway's own choice. If the number of GPUs is not given, the plan
has the smallest number with which some option serves the wanted rate.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf

from baton.core.costs import StepCosts
from baton.core.errors import ConfigError
from baton.core.pull_costs import ASSUMED_PULL, PullCosts
from baton.core.types import LocalPolicy
from baton.load.goals import Goal
from baton.load.workload import LengthSpan, Workload
from baton.planner.cluster import ClusterSpec
from baton.planner.drafts import NO_DRAFTS, MeanDrafts
from baton.planner.goodput import Goodput, Measure, find_goodput
from baton.planner.measured import SERVED_HOST
from baton.planner.memory import RankMemory
from baton.planner.node_spec import NodeSpec
from baton.planner.outcome import SimulatedOutcome
from baton.planner.sizing import STEP_SIZES, Demand, decode_step_tokens, demand, prefill_nodes, prefill_step_tokens

# Of the states of a request, those at the ends of its prompt and of its answer are kept.
_STATES_A_REQUEST = 2
# Plans are of nodes, so there are enough gateways.
_GATEWAYS = 8
_SAMPLED = 2000  # requests of the workload that give its mean lengths
_NODES_MAX = 128
_SPLITS_ALL = 8  # up to this many nodes every split is tried; beyond, those near the demand's
_NEAR = 2
_BETTER = 1.01

NOTHING = "nothing"  # limit of a search in which no rate failed


@dataclass(frozen=True)
class NodeKind:
    """The costs and sizes of one kind of node.

    Args:
        gpus: GPUs of one node.
        prefill, decode: costs of a node of each role.
        also_decodes: whether prefill nodes may serve requests alone, if the gateway chooses so.
        state_bytes: bytes of a request's recurrent state.
        kv_holders: ranks that hold different KV; 0: all.
        drafts: of nodes that decode.
        memory: of each GPU; None: unknown, because a live node gave its sizes.
        own_requests: whether each rank holds the KV of its own requests (attention data parallelism).
        redundant_experts: copies of experts in each layer.
    """

    gpus: int
    prefill: StepCosts
    decode: StepCosts
    kv_tokens: int
    kv_bytes_per_token: int
    link_bytes_per_s: float
    seats: int = 512
    prefill_seats: int = 512
    also_decodes: bool = True
    state_bytes: int = 0
    kv_holders: int = 0
    drafts: MeanDrafts = NO_DRAFTS
    memory: RankMemory | None = None
    own_requests: bool = False
    redundant_experts: int = 0

    def tokens_in(self, gib: float, *, request_tokens: float = inf) -> int:
        """The tokens whose KV and states fit into stores of this size on each rank of a node; a rank has its share of
        the heads.

        Args:
            request_tokens: of a prompt and its answer, which leave states at their ends.
        """
        bytes_per_token = self.kv_bytes_per_token + _STATES_A_REQUEST * self.state_bytes / request_tokens
        return int(gib * (1 << 30) * min(self.gpus, self.kv_holders or self.gpus) / bytes_per_token)


@dataclass(frozen=True)
class Question:
    """The question that a plan answers.

    Args:
        rate: requests per second to serve; None: the maximum that `gpus` can serve.
        gpus: number of GPUs; None: as few as serve `rate`.
        host_gib: host memory for KV of each rank.
        pull_costs: what a node's pulls from another one take.
    """

    kind: NodeKind
    workload: Workload
    goal: Goal
    rate: float | None
    gpus: int | None
    measure: Measure = Measure()  # noqa: RUF009 - frozen
    host_gib: float = 0.0
    pull_costs: PullCosts = ASSUMED_PULL


@dataclass(frozen=True)
class Option:
    """One cluster, and what it serves."""

    spec: ClusterSpec
    goodput: Goodput

    @property
    def rate(self) -> float:
        return self.goodput.rate

    @property
    def is_colocated(self) -> bool:
        return self.spec.prefills == 0

    @property
    def limit(self) -> str:
        """The bound that fails first beyond the goodput."""
        return _limit(self.goodput.limit, self.spec)


@dataclass(frozen=True)
class Plan:
    """The answer to a question. All `options` have the same number of nodes; the best one is first, and one is
    colocated."""

    question: Question
    demand: Demand
    nodes: int
    options: list[Option]
    steps: list[Option]  # the best one with other step sizes
    strict: Option | None  # the best one, with every prompt on a prefill node

    @property
    def best(self) -> Option:
        return self.options[0]

    @property
    def colocated(self) -> Option:
        return next(option for option in self.options if option.is_colocated)

    @property
    def serves(self) -> bool:
        return self.best.rate >= (self.question.rate or 0.0) and self.best.rate > 0


OnStep = Callable[[str, int, int], None]


def find_plan(question: Question, *, on_step: OnStep = lambda *_: None) -> Plan:
    """Searches the nodes that answer the question with the fewest GPUs.

    Args:
        on_step: called before each simulation, with what is simulated, how many options are done, and how many there
            are.

    Raises:
        ConfigError: the GPUs are fewer than one node's, or even the maximum number of nodes does not serve the rate.
    """
    return _Search(question, on_step).find()


class _Search:
    def __init__(self, question: Question, on_step: OnStep) -> None:
        self._question = question
        self._on_step = on_step
        kind, goal = question.kind, question.goal
        sample = question.workload.plan(question.rate or 1.0, LengthSpan(requests=_SAMPLED), 1)
        prompt = sum(request.prompt_tokens for request in sample) / len(sample)
        tpot_s = goal.tpot_s or goal.gap_s
        prefill = NodeSpec(
            kind.prefill,
            step_tokens=prefill_step_tokens(kind.prefill, prompt, goal.ttft_s),
            seats=kind.prefill_seats,
            kv_tokens=kind.kv_tokens,
            kv_bytes_per_token=kind.kv_bytes_per_token,
            state_bytes=kind.state_bytes,
            host_tokens=0 if kind.state_bytes else kind.tokens_in(question.host_gib),
            pull_costs=question.pull_costs,
            drafts=kind.drafts,
        )
        tokens = decode_step_tokens(kind.decode, tpot_s)
        decode = replace(prefill, costs=kind.decode, step_tokens=tokens, seats=kind.seats)
        self._base = ClusterSpec(
            0, 1, prefill, decode, also_decodes=kind.also_decodes, link_bytes_per_s=kind.link_bytes_per_s,
            host=replace(SERVED_HOST, gateways=_GATEWAYS),
        )  # fmt: skip
        self._demand = demand(
            kind.decode, sample, goal, step_tokens=prefill.step_tokens, seats=kind.seats, kv_tokens=kind.kv_tokens,
            drafts=kind.drafts,
        )  # fmt: skip
        self._done = self._total = 0

    def find(self) -> Plan:
        nodes = self._nodes()
        specs = [*self._specs(nodes)]
        self._done, self._total = 0, len(specs) + 4
        options = sorted((self._measured(spec) for spec in specs), key=lambda option: -option.rate)
        # Among options that are equal within the search's precision, the one with the fewest prefill nodes is simplest.
        steps, strict = [], None
        best = options[0]
        if best.rate > 0:
            steps = [self._measured(spec) for spec in self._other_steps(best.spec)]
            if best.spec.prefills:
                strict = self._measured(replace(best.spec, policy=LocalPolicy.STRICT))
            better = max(steps, key=lambda option: option.rate, default=best)
            if better.rate > _BETTER * best.rate:
                steps = [best, *(step for step in steps if step is not better)]
                options[0] = better
        return Plan(self._question, self._demand, nodes, options, steps, strict)

    def _nodes(self) -> int:
        """The number of nodes: as given, or the least one that serves the rate."""
        question = self._question
        if question.gpus is not None:
            nodes = question.gpus // question.kind.gpus
            if nodes < 1:
                raise ConfigError(
                    f"{question.gpus} GPUs are less than one node's {question.kind.gpus}", field="gpus",
                    value=question.gpus, cure="give more GPUs or another --tensor-parallel-size",
                )  # fmt: skip
            return nodes
        rate = question.rate
        assert rate is not None, "a question has a rate or GPUs"
        nodes = max(1, int(0.7 * rate * self._demand.node_s))
        while nodes <= _NODES_MAX:
            for spec in self._specs(nodes, near=1):
                self._on_step(f"{nodes} nodes, {spec.prefills} prefill", 0, 0)
                if (
                    question.measure.run(spec, question.workload, question.goal, rate).share(question.goal)
                    >= question.goal.share
                ):
                    return nodes
            nodes = max(nodes + 1, int(1.1 * nodes))
        raise ConfigError(
            f"not even {_NODES_MAX} nodes serve {rate:g} requests per second within {question.goal}", field="rate",
            value=rate, cure="give a lower rate, a looser SLO, or more GPUs to each node by --tensor-parallel-size",
        )  # fmt: skip

    def _specs(self, nodes: int, near: int = _NEAR) -> Iterable[ClusterSpec]:
        """The options: colocated, and splits."""
        yield replace(self._base, decodes=nodes, policy=LocalPolicy.LOCAL)
        wanted = prefill_nodes(self._demand, nodes)
        every = range(1, nodes)
        if nodes > _SPLITS_ALL or near < _NEAR:
            every = range(max(1, wanted - near), min(nodes - 1, wanted + near) + 1)
        for prefills in every:
            yield replace(self._base, prefills=prefills, decodes=nodes - prefills)

    def _other_steps(self, spec: ClusterSpec) -> Iterable[ClusterSpec]:
        """The same cluster with the next smaller and larger steps, of prefill nodes where there are some."""
        node = spec.prefill if spec.prefills else spec.decode
        place = STEP_SIZES.index(node.step_tokens)
        for size in (*STEP_SIZES[max(0, place - 1) : place], *STEP_SIZES[place + 1 : place + 2]):
            other = replace(node, step_tokens=size)
            yield replace(spec, prefill=other) if spec.prefills else replace(spec, decode=other)

    def _measured(self, spec: ClusterSpec) -> Option:
        nodes = spec.prefills + spec.decodes
        name = f"{spec.prefills} prefill, {spec.decodes} decode" if spec.prefills else f"{nodes} colocated"
        done, self._done = self._done, self._done + 1
        start = 0.8 * nodes / self._demand.node_s
        question = self._question
        goodput = find_goodput(
            spec, question.workload, question.goal, start=start, measure=question.measure,
            on_run=lambda: self._on_step(name, done, self._total),
        )  # fmt: skip
        return Option(spec, goodput)


def _limit(outcome: SimulatedOutcome, spec: ClusterSpec) -> str:
    """Describes what keeps the requests of a run from meeting their goal."""
    goal = outcome.goal
    # A run ends once too many have missed; the requests that run then are not judged.
    judged = (job for job in outcome.counted if job.first_s > job.due_s or job.last_s < inf)
    missed = [job for job in judged if job.first_s < inf and not job.meets(goal)]
    if not missed:
        return NOTHING
    late = sum(goal.ttft_s is not None and job.ttft_s > goal.ttft_s for job in missed)
    what = "first tokens" if 2 * late >= len(missed) else "further tokens"
    busy = {"prefill": outcome.prefill_busy if spec.prefills else 0.0, "decode": outcome.decode_busy}
    if what == "first tokens" and spec.prefills:
        role = "prefill" if busy["prefill"] >= 0.8 else "decode"
    else:
        role = "decode"
    nodes = f"{role} nodes" if spec.prefills else "nodes"
    return f"{what} on {nodes} ({100 * busy[role]:.0f} % busy)"
