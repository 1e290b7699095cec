"""Names of entries: the pieces in which KV is kept outside of the cache. Pure.

Block sizes differ between nodes, so entries have a size of their own, and keys from a chain of their own.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from baton.core.block_keys import BlockKey
from baton.core.types import LoadedTokens

# The same on every node, because it is part of every key. Transfers cut sequences at its multiples too.
ENTRY_TOKENS = 64
# Where each of some entries was: `host`, `file`, `peer`, or the name of a shared store.
Sources = tuple[str, ...]
# A day, the longest time for which a client may ask stores to keep its entries.
KEEP_S_MAX = 86400.0


class EntryKey(NamedTuple):
    """Names an entry.

    Attributes:
        block: the key of its tokens, in a chain of blocks of ENTRY_TOKENS tokens.
        root: the parent of the chain's first block; it differs between models, adapters and cache salts.
        number: how many entries of the sequence come before it.
    """

    block: BlockKey
    root: bytes
    number: int

    @property
    def token_start(self) -> int:
        return self.number * ENTRY_TOKENS

    @property
    def token_stop(self) -> int:
        return self.token_start + ENTRY_TOKENS


@dataclass(frozen=True)
class EntryState:
    """The recurrent state after an entry, and where it is in a cache.

    Attributes:
        after: key of the last entry that it includes.
        slot: of the cache's states.
    """

    after: EntryKey
    slot: int


@dataclass(frozen=True)
class NodeRanks:
    """How the ranks of a node share its KV.

    Attributes:
        size: number of ranks.
        own_requests: each rank has the whole KV of its own requests; else each has some heads of all requests.
    """

    size: int = 1
    own_requests: bool = False


@dataclass(frozen=True)
class KeptPrefix:
    """A node that has the first tokens of a sequence, as a gateway believes.

    Attributes:
        address: host:port of its gRPC server.
        tokens: how many leading tokens it has.
    """

    address: str
    incarnation: int
    tokens: int
    ranks: NodeRanks = NodeRanks()


@dataclass(frozen=True)
class EntryBlocks:
    """Consecutive entries of one sequence, and where their tokens are in a cache; maybe with the state after them, or a
    state alone.

    Attributes:
        keys: in the sequence's order.
        block_ids: block_ids[i] is for the tokens [i * block_size, (i + 1) * block_size) of the sequence. Only blocks
            with tokens of the entries count.
        owner: the rank that has the blocks; None: every rank has blocks of these numbers, for its share of the heads.
    """

    keys: tuple[EntryKey, ...]
    block_ids: tuple[int, ...]
    owner: int | None = None
    state: EntryState | None = None

    def __len__(self) -> int:
        """Number of entries; a state counts as one more."""
        return len(self.keys) + (self.state is not None)

    @property
    def root(self) -> bytes:
        return self.keys[0].root if self.state is None else self.state.after.root

    @property
    def state_after(self) -> EntryKey | None:
        """The last entry that the state includes; None: there is no state."""
        return None if self.state is None else self.state.after

    @property
    def token_stop(self) -> int:
        return self.keys[-1].token_stop


def loaded_tokens(sources: Sources, tokens: int) -> LoadedTokens:
    """The tokens of entries that were read one after the other; the last one, which may be a state, has the rest."""
    counts = dict.fromkeys(("host", "file", "store", "peer"), 0)
    for number, source in enumerate(sources, 1):
        taken = tokens if number == len(sources) else min(tokens, ENTRY_TOKENS)
        counts[source if source in counts else "store"] += taken
        tokens -= taken
    return LoadedTokens(**counts)


@dataclass(frozen=True)
class StoreChanges:
    """What has changed in the stores outside of a cache.

    Attributes:
        gone: digests of entries that no store has any more.
        below: digests of entries that have left host memory, and that a store below it has.
        found: entries that a store below host memory had when it was opened, each after those before it.
    """

    gone: tuple[bytes, ...] = ()
    below: tuple[bytes, ...] = ()
    found: tuple[EntryKey, ...] = ()


@dataclass(frozen=True)
class KeepTime:
    """How long the entries of a request are kept in stores.

    Attributes:
        seconds: from the request's end. Until then they leave after all others, as far as the tenant's share of a store
            goes. 0: the session is over, and they leave before all others.
        tenant: a number for the client, whose share is bounded.
    """

    seconds: float
    tenant: int


@dataclass(frozen=True)
class DroppedEntries:
    """What the stores of a node have dropped.

    Attributes:
        counts: number of entries that each store has dropped, by its name.
        left: why a store may still have some of them, by its name.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_all(cls, dropped: Iterable[Self]) -> Self:
        """What several drops, or those of several ranks, have dropped together."""
        counts, left = Counter[str](), dict[str, str]()
        for each in dropped:
            for name, count in each.counts.items():
                counts[name] += count
            left |= each.left
        return cls(dict(counts), left)
