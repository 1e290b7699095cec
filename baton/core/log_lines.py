"""Texts for log lines and screens that nobody can forge, and that show no prompt."""

from baton.core.errors import BatonError, InvalidRequest, readable, shortened


def loggable(error: BatonError) -> str:
    """The error for a log. Of a wrong request only the field, since the message shows what the client sent."""
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
    """About this many characters of the text, of which no terminal or browser obeys one."""
    return escaped(shortened(text, most))
