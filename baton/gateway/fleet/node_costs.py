"""What the steps of each node cost now: costs that know their age. Pure: reports of nodes in, costs out.

A node measures its steps only while it works. If it has measured on a busy machine, gets no requests for it and keeps
its costs, it never gets requests again. So the costs of a node that does not work, while others do, move to a
reference, and the node is tried again: its own profile from its start, or what nodes like it have measured since. A
profile may be of a busy machine too, so it only lasts longer.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from baton.core.costs import StepCosts, StepWork, chunk_pairs, mixed

# In so much time without work the weight of a node's own costs halves. Costs that are 10 times too high lose to an
# equal node's queue of a second after 4 to 10 s.
_HALF_LIFE_S = 2.0
# A profile that is 10 times too high loses to an equal node's queue of a second after 2 to 5 minutes. A node that is
# truly slower is tried at most as often.
_PROFILE_HALF_LIFE_S = 60.0
_FORGOTTEN, _FRESH = 0.01, 0.99
# Costs of nodes of one kind that differ by less count as equal. Profiles are measured on an idle device.
_EQUAL_PROFILED, _EQUAL = 1.1, 1.5
# By these steps costs are compared: the steps that a node of the role measures most.
PROMPT_STEP = StepWork(prompt_tokens=512, pairs=chunk_pairs(0, 512))
DECODE_STEP = StepWork(decode_rows=8, keys=8 * 512)


@dataclass(eq=False)
class NodeCosts:
    """The step costs of one node.

    Args:
        typical: the step by which its costs are compared with others'.
        kind: only nodes that are equal in it can have equal costs; all of them have the same `typical`.

    Attributes:
        reported: by the node; None: it has measured nothing.
        profile: what it measured at its start, before it served; None: nothing.
        worked_at_s: when it last had work.
    """

    typical: StepWork
    kind: tuple[int, ...] = ()
    reported: StepCosts | None = None
    profile: StepCosts | None = None
    worked_at_s: float = -inf

    def report(
        self, costs: StepCosts | None, profile: StepCosts | None, *, kind: tuple[int, ...], works: bool, now_s: float
    ) -> None:
        """Records a node's report. The first costs may have been measured at any time; they count as new."""
        if works or (self.reported is None and costs is not None):
            self.worked_at_s = now_s
        if costs != self.reported:  # else equal costs stay one object, which is compared quickly
            self.reported = costs
        self.profile, self.kind = profile, kind


@dataclass(frozen=True)
class _Weighted:
    """Costs of a node, the seconds of its typical step, and how far its own costs still count, from 0 to 1."""

    node: NodeCosts
    costs: StepCosts
    seconds: float
    weight: float


def current_costs(nodes: Sequence[NodeCosts]) -> list[StepCosts | None]:
    """The costs by which to choose among the nodes, in their order; None for a node that has measured nothing.

    A node's age counts from the last work of any node, so a pause of all traffic changes nothing.
    """
    last_s = max((node.worked_at_s for node in nodes), default=-inf)
    known = [
        _Weighted(node, node.reported, node.reported.seconds(node.typical), _weight(node.worked_at_s, last_s))
        for node in nodes
        if node.reported is not None
    ]
    kinds: dict[tuple[int, ...], list[_Weighted]] = defaultdict(list)
    for each in known:
        kinds[each.node.kind].append(each)
    found: dict[int, StepCosts] = {}
    for alike in kinds.values():
        if any(each.weight < _FRESH for each in alike):
            measured = _measured(alike, known)
            alike = [_healed(each, measured) for each in alike]
        found.update({id(each.node): costs for each, costs in zip(alike, _equalized(alike), strict=True)})
    return [found.get(id(node)) for node in nodes]


def _weight(worked_at_s: float, last_s: float) -> float:
    """Without any work so far, all costs count."""
    return 1.0 if last_s == worked_at_s else 0.5 ** ((last_s - worked_at_s) / _HALF_LIFE_S)


def _healed(each: _Weighted, measured: StepCosts) -> _Weighted:
    """The node with costs that have moved to its reference by its age."""
    if each.weight >= _FRESH:
        return each
    step, profile = each.node.typical, each.node.profile
    reference = measured if profile is None else _aged_profile(profile, measured, step, each.weight)
    if profile is not None and reference.seconds(step) >= each.seconds:
        return each  # it has measured since that its profile is too high
    costs = reference if each.weight < _FORGOTTEN else mixed(each.costs, reference, each.weight)
    return _Weighted(each.node, costs, costs.seconds(step), each.weight)


def _aged_profile(profile: StepCosts, measured: StepCosts, step: StepWork, weight: float) -> StepCosts:
    if measured.seconds(step) >= profile.seconds(step):
        return profile
    return mixed(profile, measured, weight ** (_HALF_LIFE_S / _PROFILE_HALF_LIFE_S))


def _measured(alike: Sequence[_Weighted], known: Sequence[_Weighted]) -> StepCosts:
    """What nodes of one kind have measured lately. If none of them has worked lately, what all nodes have measured
    counts where it is less: to try a slow node costs less than never to try it."""
    median, freshest = _median(alike), max(each.weight for each in alike)
    if freshest >= _FRESH:
        return median.costs
    step = alike[0].node.typical
    others = _median([_Weighted(each.node, each.costs, each.costs.seconds(step), each.weight) for each in known])
    return mixed(median.costs, others.costs, freshest) if others.seconds < median.seconds else median.costs


def _median(nodes: Sequence[_Weighted]) -> _Weighted:
    """The node whose costs are in the middle, each counted by its weight."""
    ordered = sorted(nodes, key=lambda each: each.seconds)
    left = sum(each.weight for each in ordered) / 2
    for each in ordered:
        left -= each.weight
        if left <= 0:
            return each
    return ordered[-1]


def _equalized(alike: Sequence[_Weighted]) -> list[StepCosts]:
    """The costs of each node; nodes that differ by no more than measurements do get the same ones, so that a queue, a
    cache or their turn decides between them."""
    factor = _EQUAL_PROFILED if all(each.node.profile is not None for each in alike) else _EQUAL
    costs: dict[int, StepCosts] = {}
    group: list[_Weighted] = []
    for each in [*sorted(alike, key=lambda each: each.seconds), None]:
        if group and (each is None or each.seconds > factor * group[0].seconds):
            shared = _median(group).costs
            costs.update({id(member): shared for member in group})
            group = []
        if each is not None:
            group.append(each)
    return [costs[id(each)] for each in alike]
