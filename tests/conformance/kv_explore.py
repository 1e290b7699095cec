"""Tries every order of events around a receiver: everything that can happen between two of its steps, every call at any
moment, and at each step every order in which it can process the events. The reachable states are finite in number, and
each is continued from once.

Three reductions keep them few without leaving out an order. Operations and arrivals do not depend on each other, so
only the set of them matters (`kv_sides.choices`). Messages in flight are kept as a set, and every step tries all orders
of processing them. Peers differ only in their numbers, so one of two mirrored states is continued.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations, product

from tests.conformance.kv_rules import check_idle, close, look, lose
from tests.conformance.kv_sides import Side, before_loss, can_go_on, choices
from tests.conformance.kv_world import State, World

# The description of a step, and the function that does it and returns the next state.
Step = tuple[str, Callable[[], State]]


@dataclass(frozen=True)
class Explored:
    """Counts of an exploration.

    Attributes:
        states: number of different states.
        steps: number of calls and receiver steps that were tried in them.
        ends: number of states in which nothing more can happen.
        longest: length of the longest path.
    """

    states: int
    steps: int
    ends: int
    longest: int


@dataclass
class _Seen:
    """States, each stored as the numbers of its sides: there are far fewer sides than states."""

    sides: dict[Side, int] = field(default_factory=dict)
    states: set[object] = field(default_factory=set)

    def is_new(self, state: State) -> bool:
        sides = tuple([self.sides.setdefault(side, len(self.sides)) for side in state.sides])
        parked = state.parked
        if len(sides) == 2:
            mirrored = tuple([(1 - side, number) for side, number in parked])
            sides, parked = min((sides, parked), (sides[::-1], mirrored))
        before = len(self.states)
        self.states.add((sides, parked, state.repeats))
        return len(self.states) > before


def explore(world: World, *, repeats: int) -> Explored:
    """Explores every state that the world can reach, and checks the invariants in each.

    Args:
        repeats: how many messages may be sent twice.

    Raises:
        AssertionError: an invariant does not hold; the notes list the steps that led to it.
    """
    start = world.save(repeats)
    seen = _Seen()
    seen.is_new(start)
    ways = [steps_from(world, start)]
    path: list[str] = []
    steps = ends = longest = 0
    while ways:
        for event, happen in ways[-1]:
            steps += 1
            try:
                state = happen()
            except AssertionError as error:
                error.add_note("after: " + "; ".join([*path, event]))
                raise
            if seen.is_new(state):
                ends += not any(can_go_on(side) for side in state.sides)
                path.append(event)
                ways.append(steps_from(world, state))
                longest = max(longest, len(path))
                break
        else:
            ways.pop()
            del path[-1:]
    return Explored(len(seen.states), steps, ends, longest)


def steps_from(world: World, state: State) -> Iterator[Step]:
    """Every call, and every receiver step after every possible set of events: its description, and its function.

    Calls come before the events of the same step. Where that order matters, in receives that are done before their
    link is cut, both orders are tried.
    """
    for index, side in enumerate(state.sides):
        if not side.is_called:
            yield f"close {index}", partial(_called, world, state, close, index)
        for cut in before_loss(side) if side.is_there else ():
            changed = state._replace(sides=(*state.sides[:index], cut, *state.sides[index + 1 :]))
            yield f"lose {index} with {cut.under_way}", partial(_called, world, changed, lose, index)
    for chosen in product(*[choices(side, state.repeats) for side in state.sides]):
        repeats = state.repeats - sum([choice.repeats for choice in chosen])
        if repeats >= 0:
            looked_at = State(tuple([choice.side for choice in chosen]), state.parked, repeats)
            events = " ".join([f"{index}: {choice.events}" for index, choice in enumerate(chosen)])
            yield from _looks(world, looked_at, events)


def _looks(world: World, state: State, events: str) -> Iterator[Step]:
    """From the same state, in every order of processing."""
    done = sum([stage % 2 for side in state.sides for _, stage in side.under_way])
    arrived_on = [index for index, side in enumerate(state.sides) if side.queue]
    for first in arrived_on or (0,):
        for turns in permutations(range(done)):
            yield f"{events} look from {first} in {turns}", partial(_looked, world, state, turns, first)


def _called(world: World, state: State, call: Callable[[World, int], None], index: int) -> State:
    world.load(state)
    call(world, index)
    return world.save(state.repeats)


def _looked(world: World, state: State, turns: tuple[int, ...], first: int) -> State:
    world.load(state, turns, first)
    if not look(world):
        check_idle(world)
    return world.save(state.repeats)
