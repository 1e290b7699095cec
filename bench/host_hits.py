"""Prefix hits of one node with a cache and host memory on a trace, by what is saved there and when.

`python -m bench.host_hits TRACE` prints the share of the prompts' tokens that are found, and the share of computed
tokens that are saved. Both keep what was used last; copies take no time. The node's `SaveCredit` decides what pays.
"""

import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from baton.core.block_keys import KeyChain
from baton.engine.scheduling.save_credit import SaveCredit
from baton.load.traces import MOONCAKE_PREFIX_TOKENS, read_trace

# Of Llama-3.1-8B on an H200, and what 32 and 128 GiB hold, and four times the latter.
CACHE_TOKENS, HOST_TOKENS = 840_000, (262_144, 1_048_576, 4_194_304)


@dataclass
class Node:
    """A cache and host memory, of so many blocks of the trace.

    Attributes:
        late: saves what leaves the cache; else what has been computed.
        credit: for saves; None: all is saved.
        found, saved, total: blocks.
    """

    cache: int
    host: int
    late: bool
    credit: SaveCredit | None
    found: int = 0
    saved: int = 0
    total: int = 0
    _cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _kept: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _offered: set[int] = field(default_factory=set)  # and still in the cache

    def serve(self, ids: Sequence[int]) -> None:
        cached = next((place for place, block in enumerate(ids) if block not in self._cached), len(ids))
        lacking = (place for place in range(cached, len(ids)) if ids[place] not in self._kept)
        known = next(lacking, len(ids))
        self.found += known
        self.total += len(ids)
        for block in ids[cached:known]:
            self._kept.move_to_end(block)
        keys, tokens = _keys(ids)
        if self.credit is not None:
            self.credit.returned((known - cached) * MOONCAKE_PREFIX_TOKENS)
            self.credit.began(keys, tokens, cached_blocks=known)
        for block in reversed(ids):  # so that the end of a prompt leaves before its beginning
            self._cached[block] = None
            self._cached.move_to_end(block)
        if not self.late:
            for block in reversed(ids):
                if block not in self._offered and self._save(block):
                    self._offered.add(block)
        while len(self._cached) > self.cache:
            block, _ = self._cached.popitem(last=False)
            self._offered.discard(block)
            if self.late:
                self._save(block)
        while len(self._kept) > self.host:
            self._kept.popitem(last=False)
        if self.credit is not None:
            self.credit.ended(keys, tokens, num_blocks=len(ids))

    @property
    def found_share(self) -> float:
        return self.found / self.total

    @property
    def saved_share(self) -> float:
        return self.saved / (self.total - self.found)

    def _save(self, block: int) -> bool:
        if block not in self._kept:
            if self.credit is not None:
                if not self.credit.pays:
                    return False
                self.credit.saved(MOONCAKE_PREFIX_TOKENS)
            self.saved += 1
        self._kept[block] = None
        self._kept.move_to_end(block)
        return True


def _keys(ids: Sequence[int]) -> tuple[KeyChain, "array[int]"]:
    """The prompt of these blocks, each of equal tokens."""
    tokens = array("i")
    for block in ids:
        tokens.extend(array("i", [block]) * MOONCAKE_PREFIX_TOKENS)
    return KeyChain(identity="", cache_salt="", block_size=MOONCAKE_PREFIX_TOKENS), tokens


def table(prompts: Sequence[Sequence[int]]) -> Iterator[str]:
    """The lines of a table in Markdown."""
    yield "| host memory | none | all, at once | all, late | what pays, late |"
    yield "|---" * 5 + "|"
    nothing = f"{_played(prompts, _node(0)).found_share:.1%}"
    for host in HOST_TOKENS:
        played = [_played(prompts, node) for node in (_node(host, late=False), _node(host), _node(host, pays=True))]
        cells = (f"{node.found_share:.1%}, {node.saved_share:.0%} saved" for node in played)
        yield f"| {host / 1e6:.2f}M tokens | {nothing} | {' | '.join(cells)} |"


def _node(host_tokens: int, *, late: bool = True, pays: bool = False) -> Node:
    credit = SaveCredit(CACHE_TOKENS, MOONCAKE_PREFIX_TOKENS) if pays else None
    return Node(CACHE_TOKENS // MOONCAKE_PREFIX_TOKENS, host_tokens // MOONCAKE_PREFIX_TOKENS, late, credit)


def _played(prompts: Sequence[Sequence[int]], node: Node) -> Node:
    for ids in prompts:
        node.serve(ids)
    return node


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("bench: name the trace's file, such as mooncake_conversation.jsonl.xz")
    found = [request.prefix_ids for request in read_trace(Path(sys.argv[1]))]
    print("\n".join(table(found)))
    print("\nthe same with nothing in common between prompts:\n")
    numbers = count()
    print("\n".join(table([[next(numbers) for _ in ids] for ids in found])))
