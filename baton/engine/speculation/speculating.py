"""A decoding request, as the speculator sees it."""

from typing import Protocol

from baton.engine.request import IntArray


class Speculating(Protocol):
    """A decoding request, as the scheduler has it."""

    @property
    def request_id(self) -> str: ...

    @property
    def tokens(self) -> IntArray:
        """Prompt and output as far as they are known. Grows at its end only, while the request decodes."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def most_drafts(self) -> int:
        """Most tokens that may be drafted: more could not be part of its output."""
