"""Index of the nodes' prefix cache blocks, in bounded memory. Pure.

Each block that some node has is one entry: its number, and a mask with one bit for each node. Beyond `max_blocks` the
least recently used entries are dropped. Blocks that follow a dropped one in a prompt are then not found any more.
Further masks have the nodes that must load the block first, and those that must read it from files or a shared store.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from baton.core.block_keys import BlockNumbers, KnownSlices

_HASHED_AT_ONCE = 64
_SWEPT_AT_ONCE = 512


class _Marks:
    """Masks of nodes for some of the blocks. Like those of all blocks, they may have dead bits."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._masks)

    def of(self, block: int) -> int:
        return self._masks.get(block, 0)

    def has_any(self, blocks: Iterable[int]) -> bool:
        """Whether some of the blocks have a mask; faster than a loop."""
        return set(map(self._masks.get, blocks)) != {None}

    def note(self, bit: int, blocks: Iterable[int], marked: Collection[int], alive: int) -> None:
        """Records which of these blocks are marked for the node of this bit."""
        if not self._masks and not marked:
            return
        for block in blocks:
            known = self._masks.get(block, 0)
            mask = known & alive & ~bit | (bit if block in marked else 0)
            if mask:
                self._masks[block] = mask
            elif known:
                del self._masks[block]

    def forget(self, block: int) -> None:
        self._masks.pop(block, None)


class PrefixIndex:
    """The cached blocks of all nodes.

    Args:
        max_blocks: number of entries kept; each takes about 200 bytes.
    """

    def __init__(self, max_blocks: int = 1 << 20) -> None:
        self._max_blocks = max_blocks
        self._masks: OrderedDict[int, int] = OrderedDict()  # least recently used first
        self._outside, self._below = _Marks(), _Marks()
        self._slices = KnownSlices()
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._free_bits: list[int] = []
        # Bits of forgotten nodes; a bit is reused once no entry has it.
        self._dead_bits: list[int] = []
        self._alive = -1  # mask of all other bits
        self._unswept = 0  # number of entries that may still have dead bits

    def __len__(self) -> int:
        return len(self._masks)

    def store(
        self, node: str, blocks: Sequence[int], outside: Collection[int] = (), below: Collection[int] = ()
    ) -> None:
        """Records that the node has these blocks, those `outside` of its cache alone, and of those the ones `below` not
        in host memory either."""
        bit, masks, alive = self._bit(node), self._masks, self._alive
        for block in blocks:
            masks[block] = masks.get(block, 0) & alive | bit
            masks.move_to_end(block)
        self._outside.note(bit, blocks, frozenset(outside), alive)
        self._below.note(bit, blocks, frozenset(below), alive)
        while len(masks) > self._max_blocks:
            self._unmark(masks.popitem(last=False)[0])
        self._sweep()

    def remove(self, node: str, blocks: Iterable[int]) -> None:
        """Records that the node no longer has these blocks."""
        bit, masks = self._bit(node), self._masks
        blocks = list(blocks)
        self._clear(bit, blocks)
        for block in blocks:
            mask = masks.get(block, 0) & ~bit & self._alive
            if mask:
                masks[block] = mask
            else:
                masks.pop(block, None)
                self._unmark(block)
        self._sweep()

    def forget(self, node: str) -> None:
        """Drops all blocks of the node. Returns at once; later calls free the entries step by step."""
        bit = self._bits.pop(node, None)
        if bit is None:
            return
        del self._names[bit]
        self._dead_bits.append(bit)
        self._alive &= ~bit
        self._unswept = len(self._masks)

    def look_ahead(self, prompt: BlockNumbers) -> Iterator[None]:
        """Hashes the blocks that `cached_blocks` will need, a few per step, so that other tasks can run in between."""
        hashed = 1
        while (numbers := prompt.up_to(hashed, self._slices)) and numbers[-1] in self._masks and hashed < len(prompt):
            yield
            hashed = min(len(prompt), hashed + _HASHED_AT_ONCE)

    def cached_blocks(self, prompt: BlockNumbers, nodes: Collection[str]) -> dict[str, int]:
        """Number of the prompt's leading blocks that each of these nodes has; nodes without any are left out."""
        active = 0
        for node in nodes:
            active |= self._bits.get(node, 0)
        cached: dict[str, int] = {}
        masks, length, count = self._masks, 0, len(prompt)
        # The first block settles most prompts, so it is hashed alone.
        hashed = 1
        while active and length < count:
            blocks = prompt.up_to(hashed, self._slices)[length:hashed]
            if self._all_have(blocks, active):
                length += len(blocks)
                blocks = []
            for block in blocks:
                remaining = masks.get(block, 0) & active
                if remaining != active:
                    if length:
                        self._note(cached, active & ~remaining, length)
                    active = remaining
                    if not active:
                        break
                length += 1
            hashed = min(count, hashed + _HASHED_AT_ONCE)
        if length:
            self._note(cached, active, length)
        self._touch(reversed(prompt.up_to(length)[:length]))
        return cached

    def blocks_inside(self, prompt: BlockNumbers, cached: Mapping[str, int]) -> dict[str, int]:
        """Of the leading blocks that nodes have, how many each has in its cache before the first that it must load."""
        inside = dict(cached)
        nodes = 0
        for node in cached:
            nodes |= self._bits.get(node, 0)
        if not self._outside or not nodes:
            return inside
        longest = max(cached.values())
        blocks = prompt.up_to(longest)[:longest]
        if not self._outside.has_any(blocks):  # the common case
            return inside
        for length, block in enumerate(blocks):
            mask = self._outside.of(block) & nodes
            nodes &= ~mask
            while mask:
                bit = mask & -mask
                name = self._names[bit]
                inside[name] = min(inside[name], length)
                mask ^= bit
            if not nodes:
                break
        return inside

    def blocks_below(self, prompt: BlockNumbers, cached: Mapping[str, int]) -> dict[str, int]:
        """Of the leading blocks that nodes have, how many each must read from files or a shared store; those that must
        read none are left out."""
        below: dict[str, int] = {}
        if not self._below or not cached:
            return below
        longest = max(cached.values())
        blocks = prompt.up_to(longest)[:longest]
        if not self._below.has_any(blocks):
            return below
        bits = {self._bits[node]: node for node in cached if node in self._bits}
        for index, block in enumerate(blocks):
            mask = self._below.of(block) & self._alive
            while mask:
                bit = mask & -mask
                node = bits.get(bit)
                if node is not None and index < cached[node]:
                    below[node] = below.get(node, 0) + 1
                mask ^= bit
        return below

    # ----

    def _unmark(self, block: int) -> None:
        self._outside.forget(block)
        self._below.forget(block)

    def _clear(self, bit: int, blocks: Collection[int]) -> None:
        """Clears dead bits of marks, and this one."""
        self._outside.note(bit, blocks, (), self._alive)
        self._below.note(bit, blocks, (), self._alive)

    def _touch(self, blocks: Iterable[int]) -> None:
        """Marks entries as recently used. Callers pass a prompt's last blocks first, so that they are dropped first."""
        masks = self._masks
        if not self._dead_bits:
            deque(map(masks.move_to_end, blocks), maxlen=0)  # takes a third of the time of a loop
            return
        for block in blocks:
            masks.move_to_end(block)
            masks[block] &= self._alive
            self._clear(0, (block,))

    def _all_have(self, blocks: Iterable[int], nodes: int) -> bool:
        """Whether all nodes of the mask have all the blocks. Answers this common case faster than a loop."""
        found = set(map(self._masks.get, blocks))
        return all(mask is not None and mask & nodes == nodes for mask in found)

    def _note(self, cached: dict[str, int], mask: int, length: int) -> None:
        while mask:
            bit = mask & -mask
            cached[self._names[bit]] = length
            mask ^= bit

    def _bit(self, node: str) -> int:
        bit = self._bits.get(node)
        if bit is None:
            used = len(self._bits) + len(self._dead_bits)
            bit = self._free_bits.pop() if self._free_bits else 1 << used
            self._bits[node] = bit
            self._names[bit] = node
        return bit

    def _sweep(self) -> None:
        """Clears dead bits of a few entries, least recently used first, and moves these entries to the end.

        All other changes clear dead bits too, so each entry is visited once. Until all have been, the order of use is
        not exact.
        """
        if not self._dead_bits:
            return
        masks = self._masks
        for _ in range(min(_SWEPT_AT_ONCE, self._unswept, len(masks))):
            block, mask = masks.popitem(last=False)
            if mask & self._alive:
                masks[block] = mask & self._alive
                self._clear(0, (block,))
            else:
                self._unmark(block)
        self._unswept -= _SWEPT_AT_ONCE
        if self._unswept <= 0:
            self._free_bits += self._dead_bits
            self._dead_bits, self._alive = [], -1
