"""Every error that Baton raises on purpose.

BatonError
├── ConfigError          a setting is wrong; the process ends with exit code 2
├── InvalidRequest       a value of a request is wrong
│   └── ContextOverflow  the prompt leaves no room for an output
├── Unauthenticated      the caller has not shown who it is, or its key or certificate is not valid
├── PermissionDenied     the caller may not do that
├── UnknownModel         no gateway or node serves the model
├── Overloaded           there is no room now; carries the time after which to retry
├── NoNode               no node can take the request
├── Draining             the node takes no new work
├── DeadlineExceeded     the request's deadline has passed
├── Cancelled            the caller cancelled the request
├── PeerRefused          two nodes cannot work together; lists every reason
├── UnknownLease         the node never granted this lease, or has ended it
├── DataLoss             KV arrived damaged or was lost
└── InternalError        a bug in Baton
"""

import re
from typing import ClassVar, Self

# The field of an `InternalError` about logits that are not finite, which some prompts may cause.
LOGITS_FIELD = "logits"
# Errors echo what others sent. These bounds hold wherever an error goes: a trailer, a message, a log line, stderr.
_PATH_BYTE = re.compile("[\udc80-\udcff]")  # as Python decodes a byte of a path that is no UTF-8
_TEXT_CHARACTERS_MAX, _VALUE_CHARACTERS_MAX, _ALLOWED_MAX = 4000, 256, 64


class BatonError(Exception):
    """Base of all errors. Names the wrong value, the allowed ones and the cure.

    All texts are valid Unicode of bounded length: a longer one loses its middle.

    Args:
        message: one sentence without a full stop.
        field, value: name of the wrong setting or request field, as the user knows it, and its value.
        allowed: the allowed values.
        cure: what to do next.
        retry_after_s: when to try again, if waiting helps.
    """

    reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        value: object = "",
        allowed: tuple[str, ...] = (),
        cure: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        self.message = shortened(message, _TEXT_CHARACTERS_MAX)
        self.field = shortened(field, _VALUE_CHARACTERS_MAX)
        self.value = shortened(str(value), _VALUE_CHARACTERS_MAX)
        self.allowed = tuple(shortened(each, _VALUE_CHARACTERS_MAX) for each in allowed[:_ALLOWED_MAX])
        self.cure = shortened(cure, _TEXT_CHARACTERS_MAX)
        self.retry_after_s = retry_after_s
        self.request_id = ""  # of the request that it ended; set by the gateway, and at the client
        super().__init__(self.message)

    def __str__(self) -> str:
        parts = [self.message]
        if self.allowed:
            parts.append(f"allowed: {', '.join(self.allowed)}")
        if self.cure:
            parts.append(self.cure)
        return "; ".join(parts)


class ConfigError(BatonError):
    reason = "INVALID_REQUEST"


class InvalidRequest(BatonError):
    reason = "INVALID_REQUEST"


class ContextOverflow(InvalidRequest):
    """The prompt leaves no room for an output. `of` uses OpenAI's words, by which client libraries shorten a
    conversation or take another model.

    Attributes:
        tokens: tokens of the prompt, or a lower bound of them.
        max_prompt_tokens: the longest prompt that leaves room for an output.
    """

    tokens = 0
    max_prompt_tokens = 0

    @classmethod
    def of(cls, tokens: int, max_context_tokens: int, *, field: str, cure: str = "", at_least: bool = False) -> Self:
        """Makes the error with OpenAI's message.

        Args:
            at_least: the prompt has that many tokens or more, because it was not tokenized to its end.
        """
        has = f"at least {tokens}" if at_least else str(tokens)
        message = (
            f"This model's maximum context length is {max_context_tokens} tokens. However, your prompt has {has} "
            "tokens, and the output needs 1 or more"
        )
        allowed = (f"1 to {max_context_tokens - 1} tokens",)
        made = cls(message, field=field, value=tokens, allowed=allowed, cure=cure)
        made.tokens, made.max_prompt_tokens = tokens, max_context_tokens - 1
        return made


class Unauthenticated(BatonError):
    reason = "UNAUTHENTICATED"


class PermissionDenied(BatonError):
    reason = "PERMISSION_DENIED"


class UnknownModel(BatonError):
    reason = "UNKNOWN_MODEL"


class Overloaded(BatonError):
    reason = "OVERLOADED"


class NoNode(BatonError):
    reason = "NO_NODE"


class Draining(BatonError):
    reason = "DRAINING"


class DeadlineExceeded(BatonError):
    reason = "DEADLINE_EXCEEDED"


class Cancelled(BatonError):
    reason = "CANCELLED"


class PeerRefused(BatonError):
    reason = "PEER_REFUSED"


class UnknownLease(BatonError):
    reason = "UNKNOWN_LEASE"


class DataLoss(BatonError):
    reason = "DATA_LOSS"


class InternalError(BatonError):
    reason = "INTERNAL"


def shortened(text: str, most: int) -> str:
    """At most this many characters of the text, without its middle if need be, as valid Unicode (`readable`)."""
    text = _cut(text, most)
    return text if text.isascii() else _cut(readable(text), most)


def readable(text: str) -> str:
    """The text as valid Unicode: a byte of a path that is no UTF-8 becomes `\\xe9`, any other lone surrogate `?`."""
    named = _PATH_BYTE.sub(lambda found: f"\\x{ord(found[0]) - 0xDC00:02x}", text)
    return named.encode(errors="replace").decode()


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    tail = most // 4
    return f"{text[: most - tail - 3]}...{text[-tail:]}"
