"""Writes the arguments of a call whose markup has one element for each of them, as members of a JSON object."""

from baton.gateway.text.chat.parsing.argument_types import ArgumentText, ArgumentType
from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.json_rewriter import quoted


class Members:
    """Writes the arguments of one call as they come.

    Attributes:
        is_empty: no member was written so far.
    """

    def __init__(self, out: Collector) -> None:
        self._out = out
        self.is_empty = True

    def value(self, key: str, type: ArgumentType) -> "MemberValue":
        """Returns the writer of one member. Finish it before the next one."""
        return MemberValue(self, f"{'{' if self.is_empty else ', '}{quoted(key)}: ", type)

    def write(self, json: str) -> None:
        self._out.arguments(json)

    def close(self) -> None:
        """Ends the object."""
        self._out.arguments("{}" if self.is_empty else "}")


class MemberValue:
    """Writes one member from pieces of its text. Line breaks at the end of the text may be the markup's.

    Attributes:
        is_empty: the text had nothing but line breaks so far.
    """

    def __init__(self, members: Members, lead: str, type: ArgumentType) -> None:
        self._members = members
        self._lead = lead
        self._text = ArgumentText(type)
        self._breaks = ""  # the last two line breaks, if nothing follows them
        self.is_empty = True

    def push(self, piece: str) -> None:
        piece = self._breaks + piece
        text = piece.removesuffix("\n").removesuffix("\n")
        self._breaks = piece[len(text) :]
        self.is_empty = self.is_empty and not text
        self._write(self._text.push(text) if text else "")

    def finish(self, *, breaks: int, cut: bool) -> None:
        """Ends the member.

        Args:
            breaks: how many line breaks at the end of the text are the markup's.
            cut: the text may not be whole, so the value stays open.
        """
        if kept := self._breaks[breaks:]:
            self._write(self._text.push(kept))
        self._write(self._text.held() if cut else self._text.finish(), always=True)
        self._members.is_empty = False

    def _write(self, json: str, *, always: bool = False) -> None:
        if json or always:
            self._members.write(self._lead + json)
            self._lead = ""
