"""The one way in which this package refuses a grammar."""

from baton.errors import InvalidRequest

_SHOWN = 200


def refusal(message: str, *, value: object = "", allowed: tuple[str, ...] = (), cure: str = "") -> InvalidRequest:
    """The error for a grammar that cannot be followed; long values are cut."""
    shown = str(value)
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
    return InvalidRequest(message, field="grammar", value=shown, allowed=allowed, cure=cure)
