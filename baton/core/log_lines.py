"""Makes texts safe for log lines and screens: they cannot be forged, and show no prompt."""

from baton.core.errors import BatonError, InvalidRequest, readable, shortened


def loggable(error: BatonError) -> str:
    """The error's text for a log. Of a wrong request it names only the field: the message shows what the client
    sent."""
    if isinstance(error, InvalidRequest):
        return f"{error.reason} in {error.field or 'the request'}"
    return str(error)


def escaped(text: str) -> str:
    """The text with \\n, \\x1b, \\u2028 and the like in place of characters that are not printed, as valid Unicode."""
    if text.isprintable():
        return text
    text = readable(text)
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable(text: str, most: int) -> str:
    """The text, shortened to `most` characters before control characters are escaped."""
    return escaped(shortened(text, most))
