"""Gathers what a parser finds into `ParsedDelta`s."""

from collections.abc import Callable

from baton.gateway.text.chat.parsing.cursor import SPACE, Markers
from baton.gateway.text.chat.types import ParsedDelta, ToolCallDelta


class Collector:
    """Takes pieces of reasoning, content and tool calls in order.

    Line breaks at both ends of the reasoning, after it, and white space around tool calls are the template's, not the
    model's answer, and are dropped.

    Args:
        call_id: returns the id of the call of an index.
        one_call: drop all calls but the first.
        named_ids: put `functions.NAME:` before ids, as Kimi's template expects it.
        input_of: the content is the input of a call of this tool; empty: it is text.
    """

    def __init__(
        self, call_id: Callable[[int], str], *, one_call: bool, named_ids: bool = False, input_of: str = ""
    ) -> None:
        self._call_id = call_id
        self._one_call = one_call
        self._named_ids = named_ids
        self._input_of = input_of
        self._content_began = False  # it may be empty
        self._deltas: list[ParsedDelta] = []
        self._calls = 0
        self._after_call = False  # nothing but white space has come since the last call
        self._cut_off = False
        self._reasoning = _Trimmed(leading="\n", trailing="\n")
        self._content = _Trimmed()
        self._dropped: _Dropped | None = None

    def take(self) -> list[ParsedDelta]:
        """Returns what has come since the last time."""
        taken, self._deltas = self._deltas, []
        return taken

    def trim_content(self) -> None:
        """Holds white space at the end of content back until it is known not to precede a marker."""
        self._content.trailing = SPACE

    def reasoning(self, text: str) -> None:
        self._reasoning_delta(self._reasoning.pass_on(text))

    def end_reasoning(self) -> None:
        """Ends the reasoning at a marker."""
        self._reasoning.drop()
        self._content.leading = "\n"

    def drop_in_content(self, tag: str) -> None:
        """Drops a closing tag of the whole answer wherever it comes."""
        self._dropped = _Dropped(tag)

    def content(self, text: str) -> None:
        self._content_began = True
        if self._dropped is not None:
            text = self._dropped.pass_on(text)
        self._content_delta(self._content.pass_on(text))

    def start_call(self, name: str) -> None:
        if self._dropped is not None:
            self._content_delta(self._content.pass_on(self._dropped.flush()))
        self._content.drop()
        self._content.leading = SPACE
        self._after_call = True
        self._begin_call(name)

    def _begin_call(self, name: str) -> None:
        self._calls += 1
        if self._wanted:
            prefix = f"functions.{name}:" if self._named_ids else ""
            call = ToolCallDelta(index=self._calls - 1, id=prefix + self._call_id(self._calls - 1), name=name)
            self._deltas.append(ParsedDelta(tool_calls=(call,)))

    def arguments(self, text: str) -> None:
        """Takes a piece of the arguments' JSON of the call that was started last."""
        if text and self._wanted:
            self._deltas.append(ParsedDelta(tool_calls=(ToolCallDelta(index=self._calls - 1, arguments=text),)))

    def cut_off(self) -> None:
        """Drops content that would follow a call directly: the limit cut off the tag or call that it begins."""
        self._cut_off = True

    def finish(self, *, whole: bool = True) -> None:
        """Ends the text. What was held back is the model's, unless it follows a call.

        Args:
            whole: whether the model ended the output itself. If so, an input that had begun is a call, even if it is
                empty.
        """
        if self._dropped is not None:
            self._content_delta(self._content.pass_on(self._dropped.flush()))
        self._reasoning_delta(self._reasoning.flush())
        self._content_delta(self._content.flush())
        if self._input_of and self._content_began and not self._calls and whole:
            self._begin_call(self._input_of)

    @property
    def _wanted(self) -> bool:
        return not self._one_call or self._calls == 1

    def _reasoning_delta(self, text: str) -> None:
        if text:
            self._deltas.append(ParsedDelta(reasoning=text))

    def _content_delta(self, text: str) -> None:
        if not text or (self._cut_off and self._after_call):
            return
        self._after_call = False
        if not self._input_of:
            self._deltas.append(ParsedDelta(content=text))
            return
        if not self._calls:
            self._begin_call(self._input_of)
        self.arguments(text)


class _Dropped:
    """Removes a tag, and line breaks before it, from text that comes in pieces."""

    def __init__(self, tag: str) -> None:
        self._tags = Markers(tag, "\n" + tag, "\n\n" + tag)
        self._held = ""

    def pass_on(self, text: str) -> str:
        """Returns what is certain not to belong to a tag, with the next piece."""
        *before, rest = self._tags.pattern.split(self._held + text)
        end = self._tags.held(rest, 0)
        self._held = rest[end:]
        return "".join((*before, rest[:end]))

    def flush(self) -> str:
        """Returns what was held back."""
        held, self._held = self._held, ""
        return held


class _Trimmed:
    """Removes some characters at both ends of a text that comes in pieces.

    Attributes:
        leading: characters dropped until another one comes.
        trailing: characters held back until another one comes.
    """

    def __init__(self, *, leading: str = "", trailing: str = "") -> None:
        self._held: list[str] = []  # of trailing characters only
        self.leading = leading
        self.trailing = trailing

    def pass_on(self, text: str) -> str:
        """Returns what is certain to belong to the text, with the next piece."""
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
        """Returns what was held back, as part of the text."""
        held = "".join(self._held)
        self._held.clear()
        return held
