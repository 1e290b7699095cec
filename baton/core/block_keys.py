"""Names of prefix cache blocks: equal on nodes and gateways for equal tokens, model, adapter and salt. Pure.

A block's digest covers its tokens and its parent's digest; the first parent, the root, covers model identity and salt.
An adapter's name and revision are part of the identity, because its KV differs from every other's. Messages and the
gateway's index name a block by a number, the first 8 bytes of its digest.
"""

import sys
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import copy
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

from baton.core.types import AdapterRef

IntArray: TypeAlias = "array[int]"

DIGEST_BYTES = 16
_NUMBER_BYTES = 8
_SLICE_BLOCKS = 64
_TOKEN_BYTES = 4


class BlockKey(NamedTuple):
    """Key of a full block.

    Args:
        digest: over the block's tokens and all tokens before them.
        tokens: the block's tokens, each as an int32.
        parent: digest of the block before, or the root.
    """

    digest: bytes
    tokens: bytes
    parent: bytes


class KeyChain:
    """Keys of one sequence's full blocks, each computed once and on demand.

    Attributes:
        root: the parent of the first block.
    """

    def __init__(self, *, identity: str, cache_salt: str, block_size: int) -> None:
        self._block_size = block_size
        self.root = root_digest(identity, cache_salt)
        self._keys: list[BlockKey] = []

    def key(self, index: int, tokens: IntArray) -> BlockKey:
        """Key of the sequence's block `index`; `tokens` is the sequence, which may only have grown between calls."""
        while len(self._keys) <= index:
            parent = self._keys[-1].digest if self._keys else self.root
            start = len(self._keys) * self._block_size
            content = tokens[start : start + self._block_size].tobytes()
            self._keys.append(BlockKey(_digest(parent, content), content, parent))
        return self._keys[index]

    def run(self, start: int, stop: int, tokens: IntArray) -> list[BlockKey]:
        """Keys of the blocks [start, stop); as `key`."""
        if start < stop:
            self.key(stop - 1, tokens)
        return self._keys[start:stop]

    def copy(self) -> "KeyChain":
        """A chain of the same sequence, which may grow differently from here on."""
        copied = copy(self)
        copied._keys = self._keys[:]
        return copied

    def known_keys(self, count: int) -> list[BlockKey]:
        """The keys of the first `count` blocks, as far as they are known without computing more."""
        return self._keys[:count]

    def add_known(self, tokens: IntArray, count: int, known: Mapping[tuple[bytes, bytes], BlockKey]) -> None:
        """Adds the keys of further blocks, up to `count` in all, that are among those of other sequences.

        So the digest of a block that some sequence had before is not computed again. A block is only found by all of
        its tokens and its parent's digest, which in turn was found or computed, so its key is the one that would be
        computed.

        Args:
            tokens: the sequence.
            known: keys by parent and tokens.
        """
        keys, step = self._keys, self._block_size * _TOKEN_BYTES
        first = len(keys)
        content = tokens[first * self._block_size : count * self._block_size].tobytes()
        parent = keys[-1].digest if keys else self.root
        for start in range(0, len(content) - step + 1, step):
            key = known.get((parent, content[start : start + step]))
            if key is None:
                return
            keys.append(key)
            parent = key.digest


class KeyChains:
    """The key chains of one request's tokens. Everything that asks for the same kind of blocks shares one chain, so
    each key is found or computed once. What computes further tokens copies it first."""

    def __init__(self) -> None:
        self._chains: dict[tuple[str, str, int], KeyChain] = {}

    def of(self, *, identity: str, cache_salt: str, block_size: int) -> KeyChain:
        kind = identity, cache_salt, block_size
        chain = self._chains.get(kind)
        if chain is None:
            chain = KeyChain(identity=identity, cache_salt=cache_salt, block_size=block_size)
            self._chains[kind] = chain
        return chain


def block_keys_of(parent: bytes, tokens: bytes, block_bytes: int) -> list[BlockKey]:
    """Keys of the full blocks that these tokens make.

    Args:
        parent: digest of the block before them, or the root.
        tokens: each as an int32.
        block_bytes: size of a block's tokens.
    """
    keys: list[BlockKey] = []
    for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
        content = tokens[start : start + block_bytes]
        keys.append(BlockKey(_digest(parent, content), content, parent))
        parent = keys[-1].digest
    return keys


class KnownSlices:
    """The numbers of slices of blocks that came lately, so that a conversation's next turn does not hash its beginning
    again: that takes a twelfth of the time. A slice is found by one digest over its tokens and its parent's digest.

    Args:
        max_slices: number of slices kept; each has 64 blocks and takes about 900 bytes.
    """

    def __init__(self, max_slices: int = 1 << 13) -> None:
        self._max_slices = max_slices
        self._slices: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()  # least recently used first

    def get(self, name: bytes) -> tuple[bytes, bytes] | None:
        """The numbers of a slice and the digest of its last block. Returns None if it is not known."""
        known = self._slices.get(name)
        if known is not None:
            self._slices.move_to_end(name)
        return known

    def add(self, name: bytes, numbers: bytes, digest: bytes) -> None:
        self._slices[name] = numbers, digest
        if len(self._slices) > self._max_slices:
            self._slices.popitem(last=False)


class BlockNumbers:
    """Numbers of one prompt's full blocks, computed on demand: a prompt that no node has costs one digest."""

    def __init__(self, prompt: Sequence[int], *, identity: str, cache_salt: str, block_size: int) -> None:
        self._prompt = prompt
        self._block_size = block_size
        self._root = self._digest = root_digest(identity, cache_salt)
        self._numbers: list[int] = []

    @property
    def root(self) -> int:
        """The number of the first block's parent."""
        return number_of(self._root)

    def __len__(self) -> int:
        """How many full blocks the prompt has."""
        return len(self._prompt) // self._block_size

    def up_to(self, count: int, slices: KnownSlices | None = None) -> list[int]:
        """At least the first `count` numbers, or all of them. The list grows with later calls.

        Args:
            slices: numbers that other prompts had; None: all are computed.
        """
        numbers, size = self._numbers, self._block_size
        count = min(count, len(self))
        while len(numbers) < count:
            start = len(numbers)
            stop = min(count, start + _SLICE_BLOCKS)
            tokens = self._prompt[start * size : stop * size]
            content = (tokens if isinstance(tokens, array) else array("i", tokens)).tobytes()
            if slices is None or stop - start < _SLICE_BLOCKS:
                numbers += self._computed(content)
            else:
                numbers += self._known(content, slices)
        return numbers

    def _known(self, content: bytes, slices: KnownSlices) -> "array[int]":
        name = _digest(self._digest, content)
        known = slices.get(name)
        if known is not None:
            found = array("Q", known[0])
            self._digest = known[1]
            return found
        found = self._computed(content)
        slices.add(name, found.tobytes(), self._digest)
        return found

    def _computed(self, content: bytes) -> "array[int]":
        """The numbers of the next blocks, which have these tokens."""
        digest, step, beginnings = self._digest, self._block_size * _TOKEN_BYTES, bytearray()
        for at in range(0, len(content), step):
            digest = blake2b(digest + content[at : at + step], digest_size=DIGEST_BYTES).digest()
            beginnings += digest[:_NUMBER_BYTES]
        self._digest = digest
        found = array("Q", bytes(beginnings))
        if sys.byteorder == "big":
            found.byteswap()
        return found


def adapted_identity(identity: str, adapter: AdapterRef | None) -> str:
    """The identity of a model with an adapter; without one, the model's own."""
    return identity if adapter is None else f"{identity} adapter {len(adapter.name)}:{adapter.name}{adapter.revision}"


def root_digest(identity: str, cache_salt: str) -> bytes:
    """The digest that is the parent of a sequence's first block."""
    return _digest(b"", b"%d:%b%b" % (len(identity.encode()), identity.encode(), cache_salt.encode()))


def number_of(digest: bytes) -> int:
    """The number that stands for a block."""
    return int.from_bytes(digest[:_NUMBER_BYTES], "little")


def _digest(parent: bytes, content: bytes) -> bytes:
    return blake2b(parent + content, digest_size=DIGEST_BYTES).digest()
