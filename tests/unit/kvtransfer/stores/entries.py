"""Keys and contents of entries, for tests of stores."""

from array import array
from random import Random

from baton.core.block_keys import KeyChain, root_digest
from baton.core.kv_entries import ENTRY_TOKENS, EntryKey

IDENTITY = "a model"


def root_of(salt: str = "") -> bytes:
    return root_digest(IDENTITY, salt)


def entry_keys(count: int, *, salt: str = "", first_token: int = 0) -> list[EntryKey]:
    """The keys of a sequence, as a node makes them."""
    tokens = array("i", range(first_token, first_token + count * ENTRY_TOKENS))
    chain = KeyChain(identity=IDENTITY, cache_salt=salt, block_size=ENTRY_TOKENS)
    return [EntryKey(chain.key(index, tokens), root_of(salt), index) for index in range(count)]


def entry_of(key: EntryKey, num_bytes: int) -> bytes:
    """Bytes that only this entry has."""
    return Random(key.block.digest).randbytes(num_bytes)
