"""Captured decode steps that read the keys which many rows share once: which step runs so, and the memory for it."""

from bisect import bisect_left
from collections.abc import Sequence

from attention.metadata import AttentionMetadata, CommonAttentionMetadata
from attention.metadata_builder import AttentionMetadataBuilder
from attention.prefix_group import GroupSavings, new_prefix_group
from baton.engine.batch import BatchRow
from baton.engine.device.capture import Step
from baton.engine.device.decode_buffers import DecodeBuffers
from baton.engine.device.shared_prefix import LEAST_ROWS, RowGroup, SharedPrefix


def cascade_sizes(sizes: Sequence[int]) -> list[int]:
    """The sizes that are also captured with shared keys, smallest first: every other one, with the largest. More
    padding costs less than one more graph."""
    return [size for size in sizes[::-2] if size >= LEAST_ROWS][::-1]


class CascadeSteps:
    """The steps of some sizes in which a group of rows shares keys.

    Args:
        costs: of the layers that share keys.
        buffers: of all decode steps.

    Attributes:
        launched: steps so far.
        costs: decide which steps there are.
    """

    def __init__(
        self,
        costs: GroupSavings,
        builder: AttentionMetadataBuilder[AttentionMetadata],
        buffers: DecodeBuffers,
        *,
        block_size: int,
    ) -> None:
        self.launched = 0
        self.costs = costs
        self._builder = builder
        self._prefix = SharedPrefix(costs.saved, block_size=block_size)
        width, device = buffers.table.shape[1], buffers.table.device
        self._group = new_prefix_group(buffers.max_rows, width, device)
        self._written: RowGroup | None = None
        self._sizes: list[int] = []
        self._steps: dict[int, Step] = {}

    def build(self, common: CommonAttentionMetadata) -> AttentionMetadata:
        """Plans a step, as a part of it."""
        return self._builder.build_with_prefix(common, self._group)

    def add(self, size: int, step: Step) -> None:
        """Adds the step of a size, which plans by `build`."""
        self._steps[size] = step
        self._sizes = sorted(self._steps)

    def step_for(self, rows: Sequence[BatchRow]) -> Step | None:
        """The step for these rows, with its group written to the device. Returns None if they share too little."""
        group = self._prefix.find(rows)
        place = bisect_left(self._sizes, len(rows))
        if group is None or place == len(self._sizes):
            return None
        if group is not self._written:
            self._group.fill(group.places, group.num_keys)
            self._written = group
        self.launched += 1
        return self._steps[self._sizes[place]]
