"""Draws the numbers of leases. Pure, but for the source of randomness."""

import secrets
from collections.abc import Callable, Iterator

from baton.core.errors import InternalError
from kvtransfer.leases import UsedNumbers
from kvtransfer.segments import LEASE_NUMBER_BITS


def lease_numbers(random_bits: Callable[[int], int] = secrets.randbits) -> Iterator[int]:
    """Random numbers, which nobody guesses: a prefill node knows those of its own tickets only. What tags carry of a
    number is never what they carry of one that was drawn a short time ago."""
    used = UsedNumbers()
    while True:
        number = random_bits(LEASE_NUMBER_BITS)
        try:
            used.add(number)
        except InternalError:
            continue
        yield number
