"""Makes the errors with which this package refuses a grammar."""

import json

from baton.core.errors import InvalidRequest

_SHOWN = 200


def refusal(message: str, *, value: object = "", allowed: tuple[str, ...] = (), cure: str = "") -> InvalidRequest:
    """The error for a grammar that cannot be followed; long values are cut."""
    shown = str(value)
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
    return InvalidRequest(message, field="grammar", value=shown, allowed=allowed, cure=cure)


def wrong_keyword(keyword: str, place: str, value: object, allowed: tuple[str, ...]) -> InvalidRequest:
    """The error for a JSON Schema whose keyword at `place`, a JSON pointer, has a wrong value."""
    shown = value if isinstance(value, str) else json.dumps(value)
    return refusal(
        f'the JSON Schema keyword "{keyword}" at {place or "the root"} is {shown[:100]}', value=shown, allowed=allowed
    )
