"""Places whole experts and their copies on ranks. Pure functions.

Redundant experts are copies: a layer has `num_experts + redundant` places, divided over the ranks, and an expert that
gets many tokens takes several of them, on different ranks. The plan is computed from the number of tokens of each
expert.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from baton.core.errors import ConfigError
from baton.core.expert_load import ExpertLoad

# Tolerance for sums of equal numbers in another order.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class LayerPlaces:
    """The places of one layer's experts. Places are numbered over all ranks, rank 0 first.

    Attributes:
        ranks: for each rank, the expert in each of its places. A rank never has an expert twice.
        turns: for each expert, the places that take its tokens in turn, by the token's row in the step. A copy that
            would make its rank the busiest takes no turn.
    """

    ranks: tuple[tuple[int, ...], ...]
    turns: tuple[tuple[int, ...], ...]

    @property
    def num_places(self) -> int:
        return sum(map(len, self.ranks))

    def first(self, rank: int) -> int:
        """Returns the number of the rank's first place."""
        return sum(map(len, self.ranks[:rank]))

    def of_experts(self, tokens_P: Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens of each expert, given the tokens of each place."""
        return tuple(sum(tokens_P[place] for place in places) for places in self.turns)

    def of_ranks(self, tokens_P: Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens of each rank, given the tokens of each place."""
        return tuple(sum(tokens_P[start:stop]) for start, stop in self._bounds())

    def expected(self, loads: Sequence[float]) -> tuple[float, ...]:
        """Returns the expected tokens of each rank, given the tokens of each expert."""
        tokens_P = [0.0] * self.num_places
        for load, places in zip(loads, self.turns, strict=True):
            for place in places:
                tokens_P[place] += load / len(places)
        return tuple(sum(tokens_P[start:stop]) for start, stop in self._bounds())

    def _bounds(self) -> Iterator[tuple[int, int]]:
        """Yields each rank's first place, and the place after its last."""
        return pairwise(accumulate(map(len, self.ranks), initial=0))


@dataclass(frozen=True)
class ExpertPlacement:
    """The placement of experts on ranks, layer by layer.

    Attributes:
        layers: the places of each layer; None: the layer has no experts.
        redundant: number of copies in each layer.
        mtp: the places of the MTP layer, whose tokens are not counted; None: the model does not draft with one.
    """

    layers: tuple[LayerPlaces | None, ...]
    redundant: int = 0
    mtp: LayerPlaces | None = None

    def layer(self, index: int) -> LayerPlaces:
        places = self.layers[index]
        assert places is not None, "the layer has experts"
        return places

    def num_places(self, rank: int) -> int:
        """Returns the number of places of one rank in each layer."""
        return next((len(places.ranks[rank]) for places in self.layers if places is not None), 0)

    @property
    def mixtures(self) -> Iterator[tuple[int, LayerPlaces]]:
        """Yields the layers with experts, each with its number."""
        return ((index, places) for index, places in enumerate(self.layers) if places is not None)


def place_experts(
    has_experts: Sequence[bool], num_experts: int, *, ranks: int, redundant: int = 0, load: ExpertLoad | None = None
) -> ExpertPlacement:
    """Plans all layers.

    Args:
        has_experts: whether each layer has experts.
        load: number of tokens of each expert; None: all get equally many.

    Raises:
        ConfigError: there are more copies than places for them, or the load belongs to another model.
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
    """Plans one layer. It copies the experts with the most tokens per copy, then assigns the heaviest copies first,
    each to the least busy rank. No rank becomes busier than the busiest rank would be with consecutive experts.

    Args:
        loads: tokens of each expert.
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
    """Returns the number of places of each rank; ranks differ by at most one."""
    return [places * (rank + 1) // ranks - places * rank // ranks for rank in range(ranks)]


def _copies(loads: Sequence[float], redundant: int, ranks: int) -> list[int]:
    """Returns how many copies each expert has. Each further copy goes to the expert with the most tokens per copy."""
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
            # All ranks with room have the expert, so a full rank without it moves an expert to one of them.
            fitting = [_make_room(expert, free[0], held, busy, parts)]
        rank = min(fitting, key=lambda each: (busy[each], each))
        held[rank].add(expert)
        busy[rank] -= negative
    return _places(held, held, rooms, loads)


def _make_room(
    expert: int, free: int, held: list[set[int]], busy: list[float], parts: Sequence[tuple[float, int]]
) -> int:
    """Makes room for the expert on a full rank, and returns the rank. An expert to move exists: besides this expert,
    `free` has fewer experts than a full rank, so it lacks one of the full rank's."""
    giver = min((rank for rank, own in enumerate(held) if expert not in own), key=lambda rank: (busy[rank], rank))
    moved = min(held[giver] - held[free])
    held[giver].remove(moved)
    held[free].add(moved)
    busy[giver] -= parts[moved][0]
    busy[free] += parts[moved][0]
    return giver


def _in_order(num_experts: int, rooms: Sequence[int], loads: Sequence[float] | None) -> LayerPlaces:
    """Puts consecutive experts on each rank, and each expert's tokens in one place. Ranks with the most room get the
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
    """Returns the plan in which ranks use these experts. Free places get copies that take no turn."""
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
    # Steps of few tokens use only the first turns, so these are spread over the ranks too.
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
