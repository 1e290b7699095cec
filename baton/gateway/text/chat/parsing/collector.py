"""What a parser has found, gathered into `ParsedDelta`s."""

from collections.abc import Callable

from baton.gateway.text.chat.parsing.cursor import SPACE
from baton.gateway.text.chat.types import ParsedDelta, ToolCallDelta


class Collector:
    """Takes pieces of reasoning, content and tool calls in order.

    Line breaks at both ends of the reasoning, after it, and white space around tool calls are the template's, not the
    model's answer, and are dropped.

    Args:
        call_id: the id of the call of this index.
        one_call: drop all calls but the first.
    """

    def __init__(self, call_id: Callable[[int], str], *, one_call: bool) -> None:
        self._call_id = call_id
        self._one_call = one_call
        self._deltas: list[ParsedDelta] = []
        self._calls = 0
        self._reasoning = _Trimmed(leading="\n", trailing="\n")
        self._content = _Trimmed()

    def take(self) -> list[ParsedDelta]:
        """What has come since the last time."""
        taken, self._deltas = self._deltas, []
        return taken

    def trim_content(self) -> None:
        """White space at the end of content may belong to a marker: hold it back until that is known."""
        self._content.trailing = SPACE

    def reasoning(self, text: str) -> None:
        self._reasoning_delta(self._reasoning.pass_on(text))

    def end_reasoning(self) -> None:
        """A marker ended the reasoning."""
        self._reasoning.drop()
        self._content.leading = "\n"

    def content(self, text: str) -> None:
        self._content_delta(self._content.pass_on(text))

    def start_call(self, name: str) -> None:
        self._content.drop()
        self._content.leading = SPACE
        self._calls += 1
        if self._wanted:
            call = ToolCallDelta(index=self._calls - 1, id=self._call_id(self._calls - 1), name=name)
            self._deltas.append(ParsedDelta(tool_calls=(call,)))

    def arguments(self, text: str) -> None:
        """A piece of the arguments' JSON of the call that was started last."""
        if text and self._wanted:
            self._deltas.append(ParsedDelta(tool_calls=(ToolCallDelta(index=self._calls - 1, arguments=text),)))

    def finish(self) -> None:
        """The text has ended: what was held back is the model's, unless it follows a call."""
        self._reasoning_delta(self._reasoning.flush())
        self._content_delta(self._content.flush())

    @property
    def _wanted(self) -> bool:
        return not self._one_call or self._calls == 1

    def _reasoning_delta(self, text: str) -> None:
        if text:
            self._deltas.append(ParsedDelta(reasoning=text))

    def _content_delta(self, text: str) -> None:
        if text:
            self._deltas.append(ParsedDelta(content=text))


class _Trimmed:
    """Text without some characters at its ends.

    Attributes:
        leading: characters dropped until another one comes.
        trailing: characters held back until another one comes.
    """

    def __init__(self, *, leading: str = "", trailing: str = "") -> None:
        self._held: list[str] = []  # of trailing characters only
        self.leading = leading
        self.trailing = trailing

    def pass_on(self, text: str) -> str:
        """What is certain to belong to the text, with the next piece."""
        if self.leading:
            text = text.lstrip(self.leading)
            if not text:
                return ""
            self.leading = ""
        kept = text.rstrip(self.trailing) if self.trailing else text
        before = self.flush() if kept else ""
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])
        return before + kept

    def drop(self) -> None:
        self._held.clear()

    def flush(self) -> str:
        """What was held back, as part of the text."""
        held = "".join(self._held)
        self._held.clear()
        return held
