"""Computes how close prefill and decode nodes are to each other, by the labels that they report. Pure.

A node's labels go from the widest group to the narrowest, such as zone and host. Two nodes are as close as the number
of leading labels that are equal: equal racks in different zones are different racks.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.core.limits import TOPOLOGY_LABELS_MAX

Labels: TypeAlias = tuple[str, ...]


def shared_levels(prefills: Sequence[Labels | None], decodes: Sequence[Labels | None]) -> NDArray[np.uint64]:
    """The number of leading labels that nodes share, with one row for each prefill node.

    None stands for a node whose labels are unknown yet. It may be in anybody's widest group and is counted there, so
    that a cluster that starts makes few pairs that it would not choose in the end.
    """
    shared = np.zeros((len(prefills), len(decodes)), np.uint64)
    for level in range(1, TOPOLOGY_LABELS_MAX + 1):
        numbers: dict[Labels, int] = {}
        rows = np.array([_number(each, level, numbers, missing=-1) for each in prefills])
        columns = np.array([_number(each, level, numbers, missing=-2) for each in decodes])
        if not numbers:
            break
        shared += rows[:, None] == columns[None, :]
    unknown_rows, unknown_columns = (np.array([each is None for each in nodes]) for nodes in (prefills, decodes))
    labelled_rows, labelled_columns = (np.array([each != () for each in nodes]) for nodes in (prefills, decodes))
    shared[np.ix_(unknown_rows, labelled_columns)] = 1
    shared[np.ix_(labelled_rows, unknown_columns)] = 1
    return shared


def _number(labels: Labels | None, level: int, numbers: dict[Labels, int], *, missing: int) -> int:
    """The number of the node's group at that level, counted from 0; `missing` if it has none."""
    if labels is None or len(labels) < level:
        return missing
    return numbers.setdefault(labels[:level], len(numbers))
