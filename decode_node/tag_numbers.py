"""Assigns the sender and lease numbers that KV messages carry in their tags. Pure, except for its randomness."""

import secrets
from collections.abc import Callable, Iterator
from itertools import chain

from baton.core.errors import InternalError, Overloaded
from kvtransfer.leases import UsedNumbers
from kvtransfer.segments import LEASE_NUMBER_BITS, SENDER_BITS

_END = 1 << SENDER_BITS


class SenderNumbers:
    """Consecutive numbers for the ranks of each peer.

    A number that is given back is the last to be drawn again, so that a late message of a lost peer is not mistaken for
    one of a new peer.
    """

    def __init__(self) -> None:
        self._next = 1
        self._drawn: dict[int, int] = {}

    def draw(self, count: int) -> int:
        """Returns the first of `count` consecutive numbers that no peer has.

        Raises:
            Overloaded: not enough consecutive numbers are free.
        """
        stop = _END - count + 1
        for first in chain(range(self._next, stop), range(1, min(self._next, stop))):
            if all(first + count <= start or start + size <= first for start, size in self._drawn.items()):
                self._drawn[first] = count
                self._next = first + count
                return first
        raise Overloaded(f"{len(self._drawn)} prefill nodes are paired already", retry_after_s=1.0)

    def give_back(self, first: int) -> None:
        """Frees the numbers of the peer that drew `first`."""
        del self._drawn[first]


def lease_numbers(random_bits: Callable[[int], int] = secrets.randbits) -> Iterator[int]:
    """Random lease numbers, too long to guess, so that a prefill node knows only those of its own tickets.

    A number's lease field is never that of a recently drawn number.
    """
    used = UsedNumbers()
    while True:
        number = random_bits(LEASE_NUMBER_BITS)
        try:
            used.add(number)
        except InternalError:
            continue
        yield number
