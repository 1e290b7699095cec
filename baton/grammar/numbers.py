"""Checks numbers in JSON Schemas: those that the grammar library does not compute exactly are refused, by keyword."""

from bisect import bisect_left
from decimal import Decimal
from math import isfinite, lcm
from typing import Any

from baton.grammar.refusal import refusal, wrong_keyword

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# The grammar library computes bounds with float64: from here on they are off by one, and beyond 64 bits every bound
# becomes 9223372036854775807.
_LARGEST_EXACT = 2**53
# No output is that long, so a larger maximum has no effect. The library takes lengths below 2**32.
_LARGEST_COUNT = 2**31 - 1
# A bound becomes a regular expression with a group for each decimal; the library takes 250 groups.
_MOST_DECIMALS = 50
_MULTIPLE = "multipleOf"
# The grammar library's work for the first mask grows with the square of a multiple's digits: a million, or 1.000001,
# takes 8 s, and nothing interrupts it.
_MOST_DIGITS = 100_000
_MULTIPLE_DECIMALS = 9
_PRODUCT_END = 2**32


def readable_count(value: Any, keyword: str, place: str) -> int | None:
    """The value of a keyword such as maxItems. Returns None if no output is long enough to reach this maximum.

    Raises:
        InvalidRequest: it is not a count, or no output is long enough to reach this minimum.
    """
    if not _is_number(value) or value < 0 or value % 1 != 0:
        raise wrong_keyword(keyword, place, value, ("an integer of at least 0",))
    if value <= _LARGEST_COUNT:
        return int(value)
    if keyword.startswith("min"):
        raise wrong_keyword(keyword, place, value, (f"an integer up to {_LARGEST_COUNT}",))
    return None


def check_exact(value: Any, keyword: str, place: str) -> None:
    """Checks all numbers in a value, such as that of const.

    Raises:
        InvalidRequest: the grammar library would round one of them.
    """
    if isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            check_exact(each, keyword, place)
    elif isinstance(value, float) and not isfinite(value):
        raise wrong_keyword(keyword, place, value, ("a number that a float64 can hold",))
    elif isinstance(value, int | float) and abs(value) > _LARGEST_EXACT:
        raise wrong_keyword(keyword, place, value, ("numbers from -2**53 to 2**53",))


class NumberBounds:
    """The values of minimum, maximum, exclusiveMinimum and exclusiveMaximum in one schema."""

    def __init__(self) -> None:
        self._values: dict[str, set[Decimal]] = {keyword: set() for keyword in BOUNDS}

    def add(self, schema: dict[str, Any], place: str) -> None:
        """Adds the bounds at one place of the schema.

        Raises:
            InvalidRequest: one is not a number, or the grammar library would round it, or cannot honour all of them.
        """
        here = NumberBounds()
        for keyword in [keyword for keyword in BOUNDS if keyword in schema]:
            value = schema[keyword]
            _check_bound(value, keyword, place)
            here._values[keyword].add(Decimal(repr(value)))
            self._values[keyword].add(Decimal(repr(value)))
        here.check_together()

    def check_together(self) -> None:
        """Checks bounds that may all hold for one number.

        Raises:
            InvalidRequest: the library accepts an excluded integer whose other bound is nearer than 1 to it.
        """
        every = sorted(set().union(*self._values.values()))
        for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
            for bound in (bound for bound in self._values[keyword] if bound % 1 == 0):
                place = bisect_left(every, bound) + (1 if keyword == "exclusiveMinimum" else -1)
                if 0 <= place < len(every) and abs(every[place] - bound) < 1:
                    raise refusal(
                        f'the JSON Schema keyword "{keyword}" is {bound}, and another bound is nearer than 1 to it',
                        value=bound,
                        allowed=("bounds that are further apart", "an inclusive bound, such as 0.001 for above 0"),
                    )


class Multiples:
    """The values of multipleOf in one schema. Where two of them meet, the grammar library multiplies their digits, and
    does not see when the product exceeds 32 bits."""

    def __init__(self) -> None:
        self._values: set[Decimal] = set()

    def add(self, value: Any, place: str) -> None:
        """Adds the value of a `multipleOf`.

        Raises:
            InvalidRequest: it is not a number above 0, or the library would misread it, or would take too long.
        """
        if not _is_number(value) or not 0 < value < _PRODUCT_END:
            raise wrong_keyword(_MULTIPLE, place, value, (f"a number above 0 and up to {_MOST_DIGITS}",))
        exact = Decimal(repr(value))
        digits = _digits(exact, _decimals(value))
        if digits > _MOST_DIGITS or _decimals(value) > _MULTIPLE_DECIMALS:
            allowed = f"at most {_MULTIPLE_DECIMALS} decimals, and up to {_MOST_DIGITS} units of the last one"
            raise wrong_keyword(_MULTIPLE, place, value, (allowed,))
        if not _is_read_exactly(float(value), exact):
            allowed = "a number that stays exact as a float64 when multiplied by 10, such as 2.5 or 0.01"
            raise wrong_keyword(_MULTIPLE, place, value, (allowed,))
        self._values.add(exact)

    def check_together(self) -> None:
        """Checks all values that were added, as the library will see them.

        Raises:
            InvalidRequest: the library cannot honour all of them at once.
        """
        decimals = max((_decimals(each) for each in self._values), default=0)
        common = 1
        for each in sorted(self._values):
            digits = _digits(each, decimals)
            if common * digits >= _PRODUCT_END:
                raise refusal(
                    f'the JSON Schema keyword "{_MULTIPLE}" has {len(self._values)} values that may meet in a number',
                    value=", ".join(map(str, sorted(self._values))),
                    allowed=("values whose least common multiple is small",),
                )
            common = lcm(common, digits)


def _check_bound(value: Any, keyword: str, place: str) -> None:
    if not _is_number(value):
        raise wrong_keyword(keyword, place, value, ("a number",))
    check_exact(value, keyword, place)
    if keyword.startswith("exclusive") and abs(value) == _LARGEST_EXACT:
        raise wrong_keyword(keyword, place, value, ("a number between -2**53 and 2**53",))
    if _decimals(value) > _MOST_DECIMALS:
        raise wrong_keyword(keyword, place, value, (f"a number with up to {_MOST_DECIMALS} decimals",))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _decimals(value: float | Decimal) -> int:
    exponent = Decimal(str(value)).normalize().as_tuple().exponent
    assert isinstance(exponent, int), "the value is finite"
    return max(0, -exponent)


def _digits(value: Decimal, decimals: int) -> int:
    return int(value.scaleb(decimals))


def _is_read_exactly(value: float, exact: Decimal) -> bool:
    """Whether the grammar library, which multiplies by 10 until it has an integer, gets the number that was written."""
    decimals = 0
    while value % 1 and decimals <= _MULTIPLE_DECIMALS:
        value *= 10
        decimals += 1
    return value % 1 == 0 and Decimal(value).scaleb(-decimals) == exact
