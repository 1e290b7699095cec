"""Where a layer's experts are when ranks hold whole ones: which rank has which, and which have copies. Pure.

Redundant experts are copies: a layer has `num_experts + redundant` places, divided over the ranks, and an expert that
gets many tokens takes several of them, on different ranks. The plan follows from the tokens of each expert.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from baton.core.errors import ConfigError
from baton.core.expert_load import ExpertLoad

# Of sums of equal numbers in another order.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class LayerPlaces:
    """Where the experts of one layer are. Places are numbered over all ranks, those of rank 0 first.

    Attributes:
        ranks: for each rank, the expert in each of its places; no expert is twice on a rank.
        turns: for each expert, the places that take its tokens in turn, by the number of the token's row in the step.
            A copy may be in no turn: where its rank would become the busiest one.
    """

    ranks: tuple[tuple[int, ...], ...]
    turns: tuple[tuple[int, ...], ...]

    @property
    def num_places(self) -> int:
        return sum(map(len, self.ranks))

    def first(self, rank: int) -> int:
        """The number of the rank's first place."""
        return sum(map(len, self.ranks[:rank]))

    def of_experts(self, tokens_P: Sequence[int]) -> tuple[int, ...]:
        """Tokens of each expert, given those of each place."""
        return tuple(sum(tokens_P[place] for place in places) for places in self.turns)

    def of_ranks(self, tokens_P: Sequence[int]) -> tuple[int, ...]:
        """Tokens of each rank, given those of each place."""
        return tuple(sum(tokens_P[start:stop]) for start, stop in self._bounds())

    def expected(self, loads: Sequence[float]) -> tuple[float, ...]:
        """Tokens of each rank, given those of each expert."""
        tokens_P = [0.0] * self.num_places
        for load, places in zip(loads, self.turns, strict=True):
            for place in places:
                tokens_P[place] += load / len(places)
        return tuple(sum(tokens_P[start:stop]) for start, stop in self._bounds())

    def _bounds(self) -> Iterator[tuple[int, int]]:
        """The first place of each rank, and the one after its last."""
        return pairwise(accumulate(map(len, self.ranks), initial=0))


@dataclass(frozen=True)
class ExpertPlacement:
    """Which rank holds which experts, layer by layer.

    Attributes:
        layers: by number; None: the layer has no experts.
        redundant: copies in each layer.
    """

    layers: tuple[LayerPlaces | None, ...]
    redundant: int = 0

    def layer(self, index: int) -> LayerPlaces:
        places = self.layers[index]
        assert places is not None, "the layer has experts"
        return places

    def num_places(self, rank: int) -> int:
        """Of one rank, in each layer."""
        return next((len(places.ranks[rank]) for places in self.layers if places is not None), 0)

    @property
    def mixtures(self) -> Iterator[tuple[int, LayerPlaces]]:
        """The layers with experts, and their numbers."""
        return ((index, places) for index, places in enumerate(self.layers) if places is not None)


def place_experts(
    has_experts: Sequence[bool], num_experts: int, *, ranks: int, redundant: int = 0, load: ExpertLoad | None = None
) -> ExpertPlacement:
    """The plan of all layers.

    Args:
        has_experts: of each layer.
        load: the tokens of each expert; None: all get equally many.

    Raises:
        ConfigError: there are more copies than places for them, or the load is that of another model.
    """
    most = num_experts * (ranks - 1)
    if redundant > most:
        raise ConfigError(
            f"redundant_experts is {redundant}; with {num_experts} experts on {ranks} ranks, each of which holds an "
            f"expert at most once, {most} copies are possible",
            field="redundant_experts",
            value=redundant,
            allowed=(f"0 to {most}",),
        )
    if load is None and not redundant:
        in_order = _in_order(num_experts, _rooms(num_experts, ranks), None)
        return ExpertPlacement(tuple(in_order if has else None for has in has_experts))
    loads = dict.fromkeys((index for index, has in enumerate(has_experts) if has), (1,) * num_experts)
    if load is not None:
        _check(load, set(loads), num_experts)
        loads |= load.tokens
    layers = [
        place_layer(loads[index], ranks=ranks, redundant=redundant) if has else None
        for index, has in enumerate(has_experts)
    ]
    return ExpertPlacement(tuple(layers), redundant)


def place_layer(loads: Sequence[float], *, ranks: int, redundant: int = 0) -> LayerPlaces:
    """The plan of one layer: copies for the experts with the most tokens per copy, then the heaviest copies first, each
    to the rank that has the least so far. No rank becomes busier than the busiest one of experts in order.

    Args:
        loads: of each expert.
        redundant: at most `len(loads) * (ranks - 1)`.
    """
    rooms = _rooms(len(loads) + redundant, ranks)
    copied = _pack(loads, _copies(loads, redundant, ranks), rooms)
    moved = _pack(loads, [1] * len(loads), rooms)
    plans = (copied, moved, _in_order(len(loads), rooms, loads))
    busiest = [max(plan.expected(loads)) for plan in plans]
    allowed = min(busiest) * (1 + _ROUNDING)
    return next(plan for plan, most in zip(plans, busiest, strict=True) if most <= allowed)


def _rooms(places: int, ranks: int) -> list[int]:
    """Places of each rank; ranks differ by at most one."""
    return [places * (rank + 1) // ranks - places * rank // ranks for rank in range(ranks)]


def _copies(loads: Sequence[float], redundant: int, ranks: int) -> list[int]:
    """How often each expert is there. Each further copy is of the expert with the most tokens per copy."""
    copies = [1] * len(loads)
    heap = [(-load, 1, expert) for expert, load in enumerate(loads)] if ranks > 1 else []
    heapq.heapify(heap)
    for _ in range(redundant):
        _, count, expert = heapq.heappop(heap)
        copies[expert] = count = count + 1
        if count < ranks:
            heapq.heappush(heap, (-loads[expert] / count, count, expert))
    return copies


def _pack(loads: Sequence[float], copies: Sequence[int], rooms: Sequence[int]) -> LayerPlaces:
    """Gives each copy to the rank with the least load that has room and no copy of that expert."""
    held: list[set[int]] = [set() for _ in rooms]
    busy = [0.0] * len(rooms)
    parts = [(load / count, expert) for expert, (load, count) in enumerate(zip(loads, copies, strict=True))]
    ordered = sorted((-part, expert) for part, expert in parts for _ in range(copies[expert]))
    for negative, expert in ordered:
        free = [rank for rank, room in enumerate(rooms) if len(held[rank]) < room]
        fitting = [rank for rank in free if expert not in held[rank]]
        if not fitting:
            # All ranks with room have the expert: a full one that lacks it gives one of its own to such a rank.
            fitting = [_make_room(expert, free[0], held, busy, parts)]
        rank = min(fitting, key=lambda each: (busy[each], each))
        held[rank].add(expert)
        busy[rank] -= negative
    return _places(held, held, rooms, loads)


def _make_room(
    expert: int, free: int, held: list[set[int]], busy: list[float], parts: Sequence[tuple[float, int]]
) -> int:
    """The rank that has room for the expert now. There is one: `free` has fewer experts besides this one than a full
    rank has, and so lacks one of those."""
    giver = min((rank for rank, own in enumerate(held) if expert not in own), key=lambda rank: (busy[rank], rank))
    moved = min(held[giver] - held[free])
    held[giver].remove(moved)
    held[free].add(moved)
    busy[giver] -= parts[moved][0]
    busy[free] += parts[moved][0]
    return giver


def _in_order(num_experts: int, rooms: Sequence[int], loads: Sequence[float] | None) -> LayerPlaces:
    """Consecutive experts on each rank, and each expert's tokens in one place. The ranks with the most room have the
    most experts."""
    sizes = _rooms(num_experts, len(rooms))
    own: list[set[int]] = [set()] * len(rooms)
    by_room = sorted(range(len(rooms)), key=lambda rank: rooms[rank], reverse=True)
    by_size = sorted(range(len(rooms)), key=lambda part: sizes[part], reverse=True)
    for rank, part in zip(by_room, by_size, strict=True):
        start = sum(sizes[:part])
        own[rank] = set(range(start, start + sizes[part]))
    return _places(own, own, rooms, loads or (1,) * num_experts)


def _places(
    used: Sequence[set[int]], own: Sequence[set[int]], rooms: Sequence[int], loads: Sequence[float]
) -> LayerPlaces:
    """The plan in which the ranks use these experts. Rooms that are left get copies that are in no turn."""
    idle_first = sorted(range(len(loads)), key=lambda expert: (loads[expert], expert))
    ranks = []
    for mine, room in zip(own, rooms, strict=True):
        spare = [expert for expert in idle_first if expert not in mine][: room - len(mine)]
        ranks.append(tuple(sorted((*mine, *spare))))
    turns: list[list[int]] = [[] for _ in loads]
    place = 0
    for rank, experts in enumerate(ranks):
        for expert in experts:
            if expert in used[rank]:
                turns[expert].append(place)
            place += 1
    # The first turns, which steps of few tokens take, are spread over the ranks too.
    rotated = ((*each[n % len(each) :], *each[: n % len(each)]) for n, each in enumerate(turns))
    return LayerPlaces(tuple(ranks), tuple(rotated))


def _check(load: ExpertLoad, expected: set[int], num_experts: int) -> None:
    found = set(load.tokens)
    sizes = {len(tokens) for tokens in load.tokens.values()}
    if found == expected and sizes == {num_experts}:
        return
    raise ConfigError(
        f"the expert load is of {len(found)} layers with {', '.join(map(str, sorted(sizes)))} experts, and the model "
        f"has {len(expected)} layers with {num_experts}",
        field="expert_load",
        value=load.model,
        cure="save it anew, from a node with this model, by `baton expert-load`",
    )
