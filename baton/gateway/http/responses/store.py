"""Keeps responses with the items that led to them, within a number of bytes. Pure.

A conversation's responses share their items: each refers to the one before it, whose bytes count as long as anything
refers to them.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

_OVERHEAD_BYTES = 1000  # of one response, apart from its texts


@dataclass(frozen=True, eq=False, slots=True)
class StoredResponse:
    """One response.

    Attributes:
        key: the part of its id, and of its items' ids, that no other response has.
        body: the whole object as JSON.
        inputs, outputs: the items that its request and its answer add to the conversation, as JSON without brackets.
        parent: the response that it continues; None: it begins a conversation.
    """

    key: str
    body: bytes
    inputs: bytes
    outputs: bytes
    parent: "StoredResponse | None" = None

    @property
    def size_bytes(self) -> int:
        return len(self.body) + len(self.inputs) + len(self.outputs) + _OVERHEAD_BYTES

    def conversation(self) -> "list[StoredResponse]":
        """Returns all responses of the conversation up to this one, the oldest first."""
        return list(self._backwards())[::-1]

    @property
    def conversation_bytes(self) -> int:
        return sum(each.size_bytes for each in self._backwards())

    @property
    def items_bytes(self) -> int:
        """Bytes of the conversation's items, without the objects that also have a request's tools and options."""
        return sum(len(each.inputs) + len(each.outputs) for each in self._backwards())

    def _backwards(self) -> "Iterator[StoredResponse]":
        each: StoredResponse | None = self
        while each is not None:
            yield each
            each = each.parent


class ResponseStore:
    """The stored responses of all callers. A caller finds only its own.

    If there are too many bytes, the caller who stores most of them loses the response that it used least recently.

    Args:
        bytes_max: most bytes of all responses.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._by_owner: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._bytes: dict[str, int] = {}  # by owner
        self._holders: dict[StoredResponse, int] = {}  # references from the table and from later responses

    @property
    def size_bytes(self) -> int:
        return sum(self._bytes.values())

    def put(self, owner: str, response: StoredResponse, *, room_bytes: int | None = None) -> bool:
        """Stores a response, in place of one with the same key. Returns False if its conversation is too large.

        Args:
            room_bytes: all responses shall take no more, except for this one's conversation; None: `bytes_max`.
        """
        conversation_bytes = response.conversation_bytes
        if conversation_bytes > self.bytes_max:
            return False
        mine = self._by_owner.setdefault(owner, OrderedDict())
        self._hold(owner, response)
        replaced = mine.pop(response.key, None)
        mine[response.key] = response
        if replaced is not None:
            self._release(owner, replaced)
        self.fit(self.bytes_max if room_bytes is None else max(room_bytes, conversation_bytes))
        return True

    def fit(self, room_bytes: int) -> None:
        """Forgets responses until the others take no more than that."""
        while self.size_bytes > room_bytes:
            self._evict()

    def get(self, owner: str, key: str) -> StoredResponse | None:
        """Returns the owner's response, which counts as a use of it."""
        mine = self._by_owner.get(owner)
        if mine is None or key not in mine:
            return None
        mine.move_to_end(key)
        return mine[key]

    def delete(self, owner: str, key: str) -> bool:
        """Forgets a response. Later ones of its conversation keep its items. Returns whether there was one."""
        mine = self._by_owner.get(owner)
        found = None if mine is None else mine.pop(key, None)
        if found is None:
            return False
        self._release(owner, found)
        return True

    def _evict(self) -> None:
        owner = max(self._bytes, key=self._bytes.__getitem__)
        _, oldest = self._by_owner[owner].popitem(last=False)
        self._release(owner, oldest)

    def _hold(self, owner: str, response: StoredResponse) -> None:
        each: StoredResponse | None = response
        while each is not None:
            holders = self._holders.get(each, 0)
            self._holders[each] = holders + 1
            if holders:
                return
            self._bytes[owner] = self._bytes.get(owner, 0) + each.size_bytes
            each = each.parent

    def _release(self, owner: str, response: StoredResponse) -> None:
        each: StoredResponse | None = response
        while each is not None:
            self._holders[each] -= 1
            if self._holders[each]:
                break
            del self._holders[each]
            self._bytes[owner] -= each.size_bytes
            each = each.parent
        if not self._by_owner[owner]:
            del self._by_owner[owner], self._bytes[owner]
