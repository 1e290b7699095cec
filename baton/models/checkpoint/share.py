"""The part of one tensor that a rank holds, also for tensors that join several others."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """A rank's share of a tensor: the entries in `ranges`, one after the other, of `size` entries along axis `dim`. The
    memory for a share may be longer; zeros then follow the entries."""

    dim: int
    size: int
    ranges: tuple[range, ...]

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the whole tensor if the memory for this share has `shape`."""
        return *shape[: self.dim], self.size, *shape[self.dim + 1 :]


def as_inputs(outputs: Share) -> Share:
    return Share(1, outputs.size, outputs.ranges)


def one_after_another(*shares: Share) -> Share:
    """Returns the share of a tensor that has several tensors' outputs, one after another."""
    ranges: list[range] = []
    size = 0
    for share in shares:
        ranges += (range(size + part.start, size + part.stop) for part in share.ranges)
        size += share.size
    return Share(0, size, tuple(ranges))


def by_turns(part: Share) -> Share:
    """Returns the share of a tensor that alternates gates and ups, given the part of each."""
    return Share(part.dim, 2 * part.size, tuple(times(each, 2) for each in part.ranges))


def with_gates(queries: Share) -> Share:
    """Returns the share of a tensor that has a gate after each head's queries, of the queries' size."""
    return Share(0, 2 * queries.size, tuple(times(part, 2) for part in queries.ranges))


def times(part: range, factor: int) -> range:
    return range(part.start * factor, part.stop * factor)
