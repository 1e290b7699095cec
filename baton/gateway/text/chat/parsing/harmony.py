"""Reads messages of gpt-oss: `<|channel|>NAME to=RECIPIENT<|message|>...<|end|>`.

The channel `analysis` is reasoning, and `final` is the answer. A message in `commentary` to `functions.NAME` is a tool
call. Without a recipient it is text for the user, which introduces calls.
"""

import re
from collections.abc import Callable

from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.cursor import Cursor, Markers, Reading
from baton.gateway.text.chat.parsing.lenient_json import ArgumentJson

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
IN_HEADER = Markers(MESSAGE, *ENDS)
IN_BODY = Markers(*ENDS, START, CHANNEL)
RECIPIENT = re.compile(r"to=([^\s<]+)")
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
FUNCTIONS = "functions."


def harmony(header: str | None, *, tools: bool) -> Callable[[Cursor, Collector], Reading[None]]:
    """Returns the reader of the Harmony format.

    Args:
        header: the header of a message that the prompt leaves open; None: the output begins with a header.
        tools: whether calls are allowed; otherwise they are content.
    """

    def read(cursor: Cursor, out: Collector) -> Reading[None]:
        head = header
        while True:
            if head is None:
                head = yield from _header(cursor, out)
            if head is None:
                return
            end = yield from _body(cursor, out, head, tools=tools)
            if not end:
                return
            head = None
            if end in (START, CHANNEL):  # the message was not closed, and the next header begins
                cursor.unread(end)

    return read


def _header(cursor: Cursor, out: Collector) -> Reading[str | None]:
    """Reads and returns the next message's header; None: the text ended. Text without a header is content."""
    yield from cursor.skip_space()
    for begin in (START, CHANNEL, CONSTRAIN, "to="):
        start = cursor.position
        if (yield from cursor.accept(begin)):
            cursor.position = start
            break
    else:
        return "" if (yield from cursor.peek()) else None
    pieces: list[str] = []
    marker = yield from cursor.until(IN_HEADER, pieces.append)
    header = "".join(pieces)
    if marker == MESSAGE:
        return header
    out.content(header)
    return "" if marker else None


def _body(cursor: Cursor, out: Collector, header: str, *, tools: bool) -> Reading[str]:
    """Reads a message's text and its end, and returns the end."""
    recipient = RECIPIENT.search(header)
    channel = CHANNEL_NAME.search(header)
    to = recipient.group(1) if recipient else ""
    name = to.removeprefix(FUNCTIONS) if to.startswith(FUNCTIONS) else ""
    if name and tools:
        out.start_call(name)
        arguments = ArgumentJson()
        end = yield from cursor.until(IN_BODY, lambda piece: out.arguments(arguments.push(piece)))
        out.arguments(arguments.finish(cut=cursor.cut and not end))
        return end
    if to or (channel and channel.group(1) == "analysis"):
        return (yield from cursor.until(IN_BODY, out.content if to.startswith(FUNCTIONS) else out.reasoning))
    return (yield from cursor.until(IN_BODY, out.content))


def opened_header(prompt: str) -> str | None:
    """Returns the header of the message that the prompt leaves open, such as one to continue; None: it leaves none."""
    header, found, body = prompt[prompt.rfind(START) :].partition(MESSAGE)
    if not found or any(end in body for end in ENDS):
        return None
    return header
