"""Names of entries: the pieces in which KV is kept outside of the cache. Pure.

Block sizes differ between nodes, so entries have a size of their own, and keys from a chain of their own.
"""

from dataclasses import dataclass
from typing import NamedTuple

from baton.core.block_keys import BlockKey

# The same on every node, because it is part of every key. Transfers cut sequences at its multiples too.
ENTRY_TOKENS = 64


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
class KeptPrefix:
    """A node that has the first tokens of a sequence, as a gateway believes.

    Attributes:
        address: host:port of its gRPC server.
        tokens: how many leading tokens it has.
    """

    address: str
    incarnation: int
    tokens: int


@dataclass(frozen=True)
class EntryBlocks:
    """Consecutive entries of one sequence, and where their tokens are in a cache.

    Attributes:
        keys: in the sequence's order.
        block_ids: block_ids[i] is for the tokens [i * block_size, (i + 1) * block_size) of the sequence. Only blocks
            with tokens of the entries count.
        owner: the rank that has the blocks; None: every rank has blocks of these numbers, for its share of the heads.
    """

    keys: tuple[EntryKey, ...]
    block_ids: tuple[int, ...]
    owner: int | None = None

    @property
    def token_stop(self) -> int:
        return self.keys[-1].token_stop
