"""Current step costs of each node: measured costs that age while the node is idle. Pure: node reports in, costs out.

A node measures its steps only while it works. If it measured high costs on a busy machine, it gets no requests, and
without aging it would keep these costs and never get requests again. So the costs of a node that is idle while others
work move to a reference, and the node is tried again. The reference is the node's profile from its start, or what nodes
of its kind have measured since. A profile may come from a busy machine too, so it also ages, but more slowly.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from baton.core.costs import StepCosts, StepWork, chunk_pairs, mixed

# The weight of an idle node's measured costs halves in this time. A node whose costs are 10 times too high is tried
# again, against an equal node with a queue of 1 s, after 4 to 10 s.
_HALF_LIFE_S = 2.0
# Likewise on a node without a profile, whose first steps may have met a busy machine. Of two equal nodes on two busy
# cores, one had measured 254 ms and the other 18 ms: with the longer time, the first one got 8 of 60 prompts.
# In return, a node that is truly slower is tried more often.
_UNPROFILED_HALF_LIFE_S = 0.5
# Likewise for a profile: one that is 10 times too high delays the trial by 2 to 5 minutes. A node that is truly slower
# is tried at most this often.
_PROFILE_HALF_LIFE_S = 60.0
_FORGOTTEN, _FRESH = 0.01, 0.99
# Costs of nodes of one kind that differ by less count as equal. Profiles are measured on an idle device.
_EQUAL_PROFILED, _EQUAL = 1.1, 1.5
# Costs are compared for these steps, which a node of the role runs most.
PROMPT_STEP = StepWork(prompt_tokens=512, pairs=chunk_pairs(0, 512))
DECODE_STEP = StepWork(decode_rows=8, keys=8 * 512)


@dataclass(eq=False)
class NodeCosts:
    """The step costs of one node.

    Args:
        typical: the step for which its costs are compared with other nodes' costs.
        kind: only nodes of equal kind can have equal costs; they also have the same `typical`.

    Attributes:
        reported: costs that the node last reported; None: it has measured none.
        profile: costs that the node measured at its start, before it served; None: it has none.
        worked_at_s: time at which the node last had work.
        works: whether it had work by its last report. It reports seldom while nothing changes.
    """

    typical: StepWork
    kind: tuple[int, ...] = ()
    reported: StepCosts | None = None
    profile: StepCosts | None = None
    worked_at_s: float = -inf
    works: bool = False

    def report(
        self, costs: StepCosts | None, profile: StepCosts | None, *, kind: tuple[int, ...], works: bool, now_s: float
    ) -> None:
        """Records a node's report. The first reported costs count as new, although their age is unknown."""
        self.works = works
        if works or (self.reported is None and costs is not None):
            self.worked_at_s = now_s
        if costs != self.reported:  # equal costs stay one object, so that callers can compare by identity
            self.reported = costs
        self.profile, self.kind = profile, kind

    def still(self, *, works: bool, now_s: float) -> None:
        """Records that the last report is true still."""
        self.works = works
        if works:
            self.worked_at_s = now_s


@dataclass(frozen=True)
class _Weighted:
    """Costs of a node, the seconds of its typical step, and the weight of its measured costs, from 0 to 1."""

    node: NodeCosts
    costs: StepCosts
    seconds: float
    weight: float


def current_costs(nodes: Sequence[NodeCosts]) -> list[StepCosts | None]:
    """The costs to use in the choice among the nodes, in their order; None for a node that has measured nothing.

    Age counts up to the last work of any node, so costs do not age while there is no traffic at all.
    """
    last_s = max((node.worked_at_s for node in nodes), default=-inf)
    known = [
        _Weighted(node, node.reported, node.reported.seconds(node.typical), _weight(node, last_s))
        for node in nodes
        if node.reported is not None
    ]
    kinds: dict[tuple[int, ...], list[_Weighted]] = defaultdict(list)
    for each in known:
        kinds[each.node.kind].append(each)
    found: dict[int, StepCosts] = {}
    for peers in kinds.values():
        if any(each.weight < _FRESH for each in peers):
            measured = _recently_measured(peers, known)
            peers = [_aged(each, measured) for each in peers]
        found.update({id(each.node): costs for each, costs in zip(peers, _equalized(peers), strict=True)})
    return [found.get(id(node)) for node in nodes]


def _weight(node: NodeCosts, last_s: float) -> float:
    """The weight of a node's measured costs; 1 while it works, or no node has had work."""
    if node.works or node.worked_at_s == last_s:
        return 1.0
    half_life_s = _UNPROFILED_HALF_LIFE_S if node.profile is None else _HALF_LIFE_S
    return float(0.5 ** ((last_s - node.worked_at_s) / half_life_s))


def _aged(each: _Weighted, measured: StepCosts) -> _Weighted:
    """Moves a node's costs toward its reference according to their age."""
    if each.weight >= _FRESH:
        return each
    step, profile = each.node.typical, each.node.profile
    reference = measured if profile is None else _aged_profile(profile, measured, step, each.weight)
    if profile is not None and reference.seconds(step) >= each.seconds:
        return each  # the node's measured costs are no higher than its reference
    costs = reference if each.weight < _FORGOTTEN else mixed(each.costs, reference, each.weight)
    return _Weighted(each.node, costs, costs.seconds(step), each.weight)


def _aged_profile(profile: StepCosts, measured: StepCosts, step: StepWork, weight: float) -> StepCosts:
    if measured.seconds(step) >= profile.seconds(step):
        return profile
    return mixed(profile, measured, weight ** (_HALF_LIFE_S / _PROFILE_HALF_LIFE_S))


def _recently_measured(peers: Sequence[_Weighted], known: Sequence[_Weighted]) -> StepCosts:
    """The median of what nodes of one kind have measured recently.

    If none of them has worked recently, the median of all nodes counts too where it is lower: trying a slow node costs
    less than never trying it.
    """
    median, freshest = _median(peers), max(each.weight for each in peers)
    if freshest >= _FRESH:
        return median.costs
    step = peers[0].node.typical
    others = _median([_Weighted(each.node, each.costs, each.costs.seconds(step), each.weight) for each in known])
    return mixed(median.costs, others.costs, freshest) if others.seconds < median.seconds else median.costs


def _median(nodes: Sequence[_Weighted]) -> _Weighted:
    """The node with the weighted median of the costs."""
    ordered = sorted(nodes, key=lambda each: each.seconds)
    left = sum(each.weight for each in ordered) / 2
    for each in ordered:
        left -= each.weight
        if left <= 0:
            return each
    return ordered[-1]


def _equalized(peers: Sequence[_Weighted]) -> list[StepCosts]:
    """The costs of each node, where nodes whose costs differ only by measurement noise get the same costs.

    A queue, a cache or the round-robin order then decides between them.
    """
    factor = _EQUAL_PROFILED if all(each.node.profile is not None for each in peers) else _EQUAL
    costs: dict[int, StepCosts] = {}
    group: list[_Weighted] = []
    for each in [*sorted(peers, key=lambda each: each.seconds), None]:
        if group and (each is None or each.seconds > factor * group[0].seconds):
            shared = _median(group).costs
            costs.update({id(member): shared for member in group})
            group = []
        if each is not None:
            group.append(each)
    return [costs[id(each)] for each in peers]
