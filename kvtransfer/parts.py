"""The parts of one rank's cache: KV, and an index, drafts' KV or a state if the model has one. Pure; no torch.

Segments number the layers of all parts in one sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.kvcache.spec import KVCacheSpec, KVKind
from kvtransfer.segments import Segment


class PartPlace(NamedTuple):
    """The place of a segment in its part's cache: the cache's own layers and heads, and positions in its blocks."""

    part: int
    layers: range
    token_start: int
    token_stop: int
    heads: range


@dataclass(frozen=True)
class Part:
    """One part of a rank's cache.

    Attributes:
        number: its index in `KVCacheSpec.parts`; KV has 0.
        spec: of the rank's cache, or of the payloads if a sender converts them.
        layers: its layers, numbered over all parts.
        heads: the model's heads that the cache holds.
        drafts: it belongs to layers that draft tokens, which the other node of a pair may lack.
    """

    number: int
    spec: KVCacheSpec
    layers: range
    heads: range
    drafts: bool = False

    def place(self, segment: Segment) -> PartPlace:
        """The place of one of this part's segments. A state's slot holds one cell, so its token is always 0."""
        layers, heads = self.cells(segment.layers, segment.heads)
        if self.spec.kind is KVKind.STATE:
            return PartPlace(self.number, layers, 0, 1, heads)
        return PartPlace(self.number, layers, segment.token_start, segment.token_stop, heads)

    def cells(self, layers: range, heads: range) -> tuple[range, range]:
        """The cache's own numbers of some of this part's layers and heads."""
        if self.layers.start:
            layers = range(layers.start - self.layers.start, layers.stop - self.layers.start, layers.step)
        if self.heads.start:
            heads = range(heads.start - self.heads.start, heads.stop - self.heads.start)
        return layers, heads


def parts_of(spec: KVCacheSpec, heads: Sequence[range] = ()) -> tuple[Part, ...]:
    """The parts of a rank whose cache has that spec.

    Args:
        heads: the model's heads that each part holds; empty: those of its spec, from the first.
    """
    held = heads or [range(part.num_kv_heads) for part in spec.parts]
    num_others = len(spec.without_draft.parts)
    drafts = [number >= num_others for number in range(len(spec.parts))]
    return tuple(map(Part, range(len(spec.parts)), spec.parts, spec.part_layers, held, drafts))


def part_with(parts: Sequence[Part], layers: range) -> Part | None:
    """The part that has all these layers. Returns None if no part has them all."""
    for part in parts:
        if layers.start in part.layers:
            return part if layers.start < layers.stop <= part.layers.stop else None
    return None
