"""Names of prefix cache blocks: equal on nodes and gateways for equal tokens, model, adapter and salt. Pure.

A block's digest covers its tokens and its parent's digest; the first parent, the root, covers model identity and salt.
An adapter's name and revision are part of the identity, because its KV differs from every other's. Messages and the
gateway's index name a block by a number, the first 8 bytes of its digest.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

from baton.core.types import AdapterRef

IntArray: TypeAlias = "array[int]"

DIGEST_BYTES = 16
_NUMBER_BYTES = 8
_SLICE_BLOCKS = 64


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

    def up_to(self, count: int) -> list[int]:
        """At least the first `count` numbers, or all of them. The list grows with later calls."""
        numbers, size = self._numbers, self._block_size
        count = min(count, len(self))
        while len(numbers) < count:
            start = len(numbers)
            stop = min(count, start + _SLICE_BLOCKS)
            content = array("i", self._prompt[start * size : stop * size]).tobytes()
            digest, step = self._digest, size * 4
            for at in range(0, len(content), step):
                digest = blake2b(digest + content[at : at + step], digest_size=DIGEST_BYTES).digest()
                numbers.append(int.from_bytes(digest[:_NUMBER_BYTES], "little"))
            self._digest = digest
        return numbers


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
