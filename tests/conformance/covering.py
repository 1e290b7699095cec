"""Few rows in which any two values of any two parameters meet: pairwise covering, greedy and deterministic. Pure."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
# A parameter and one of its values, by their numbers: `sorted` is the space's order.
Item = tuple[int, int]
Pair = tuple[Item, Item]

# Candidates for each row: more candidates give fewer rows, and take longer.
_TRIES = 4


@dataclass(frozen=True)
class Rule:
    """A row is allowed only if this holds of its values for these parameters, given in this order."""

    names: tuple[str, ...]
    holds: Callable[..., bool]


@dataclass(frozen=True)
class Space:
    """All rows that take each parameter's value from those listed and that every rule allows."""

    parameters: Mapping[str, Sequence[Any]]
    rules: tuple[Rule, ...] = ()
    _known: dict[tuple[tuple[str, Any], ...], bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    def allows(self, row: Mapping[str, Any]) -> bool:
        """Whether no rule forbids the row. Rules that need a missing value are not applied."""
        return all(
            rule.holds(*(row[name] for name in rule.names))
            for rule in self.rules
            if all(name in row for name in rule.names)
        )

    def rows(self) -> Iterator[Row]:
        """Every row."""
        names = tuple(self.parameters)
        for values in product(*self.parameters.values()):
            row = dict(zip(names, values, strict=True))
            if self.allows(row):
                yield row

    def has_row_with(self, some: Mapping[str, Any]) -> bool:
        """Whether there is a row with these values."""
        return all(self._group_completes(group, some) for group in self._groups)

    @cached_property
    def _groups(self) -> tuple[tuple[str, ...], ...]:
        """Groups of parameters that rules connect. The values of different groups are independent."""
        groups: list[set[str]] = []
        for rule in self.rules:
            tied = set(rule.names).union(*(group for group in groups if group & set(rule.names)))
            groups = [*(group for group in groups if not group & tied), tied]
        return tuple(tuple(name for name in self.parameters if name in group) for group in groups)

    def _group_completes(self, group: tuple[str, ...], some: Mapping[str, Any]) -> bool:
        row = {name: some[name] for name in group if name in some}
        key = tuple(row.items())
        if key not in self._known:
            self._known[key] = self._completes(row, group)
        return self._known[key]

    def _completes(self, row: Row, group: tuple[str, ...]) -> bool:
        if not self.allows(row):
            return False
        missing = next((name for name in group if name not in row), None)
        return missing is None or any(
            self._completes({**row, missing: value}, group) for value in self.parameters[missing]
        )


def pairs_of(space: Space) -> list[Pair]:
    """All pairs that occur in any row."""
    numbered = list(enumerate(space.parameters.items()))
    return [
        ((one, first), (other, second))
        for (one, (name, values)), (other, (other_name, other_values)) in combinations(numbered, 2)
        for first, second in product(range(len(values)), range(len(other_values)))
        if space.has_row_with({name: values[first], other_name: other_values[second]})
    ]


def covering(space: Space) -> list[Row]:
    """Rows of the space that together have every pair that any of its rows has."""
    generator = random.Random(0)
    missing = dict.fromkeys(pairs_of(space))  # in order: a set's would not be the same every time
    rows = []
    while missing:
        pair = next(iter(missing))
        tried = [_items_around(space, pair, missing, generator) for _ in range(_TRIES)]
        found = [[both for both in combinations(items, 2) if both in missing] for items in tried]
        best = max(range(_TRIES), key=lambda index: len(found[index]))
        for both in found[best]:
            del missing[both]
        rows.append(_row_of(space, tried[best]))
    return rows


def _items_around(space: Space, pair: Pair, missing: Mapping[Pair, None], generator: random.Random) -> list[Item]:
    """A row with that pair. Each other value in turn is the one that adds most missing pairs."""
    items, row = list(pair), _row_of(space, pair)
    names = list(space.parameters)
    numbers = [number for number in range(len(names)) if names[number] not in row]
    generator.shuffle(numbers)
    for number in numbers:
        values = space.parameters[names[number]]
        choices = [(number, value) for value in range(len(values))]
        generator.shuffle(choices)
        gains = {
            item: sum(((item, other) if item < other else (other, item)) in missing for other in items)
            for item in choices
        }
        choices.sort(key=gains.__getitem__, reverse=True)
        taken = next(item for item in choices if space.has_row_with({**row, names[number]: values[item[1]]}))
        items.append(taken)
        row[names[number]] = values[taken[1]]
    return sorted(items)


def _row_of(space: Space, items: Sequence[Item]) -> Row:
    parameters = list(space.parameters.items())
    return {parameters[number][0]: parameters[number][1][value] for number, value in items}
