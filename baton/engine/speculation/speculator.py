"""What the scheduler asks about guesses: whether to wait for the newest tokens, what to guess, and what was kept.

Only a request whose tokens are all known can be guessed for, so no step may be in flight then. That costs the time in
which the next step is otherwise prepared. `pays` says whether guesses are worth it, from tokens that are known already.
"""

from collections.abc import Sequence
from typing import Protocol

from baton.core.costs import StepWork
from baton.core.types import Grammar
from baton.engine.request import IntArray
from baton.engine.scheduling.slices import StepTimes
from baton.engine.speculation.depth import Draft


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
        """Most tokens that may be guessed: more could not be part of its output."""


class Speculator:
    """The guesses of one engine.

    Attributes:
        drafted, accepted: guessed tokens that steps have taken so far, and those of them that were kept.
    """

    drafted: int
    accepted: int

    def __init__(self, *, always: bool = False) -> None: ...

    def begin(self, request: Speculating, *, root: bytes, grammar: Grammar | None) -> None:
        """A request begins to decode here. Later calls for it do nothing.

        Args:
            root: of its tenant's KV, see `baton.core.block_keys`: only outputs with the same root are looked at.
        """

    def end(self, request: Speculating) -> None:
        """The request has ended, or lost its blocks. Its output may help others with the same root."""

    def drop_roots(self, roots: frozenset[bytes]) -> None:
        """Forgets the outputs with these roots, also those of live requests."""

    def pays(self, requests: Sequence[Speculating], work: StepWork, costs: StepTimes | None) -> bool:
        """Whether to let the steps in flight end before the next one, because guesses would then bring more tokens.
        The newest token of a request may be unknown.

        Args:
            work: one token of each request that decodes.
        """

    def choose(
        self, requests: Sequence[Speculating], work: StepWork, costs: StepTimes | None, *, room: int
    ) -> dict[str, Draft]:
        """The guesses that the next step takes, by request; only requests with some. All tokens of the requests are
        known.

        Args:
            room: most guessed tokens of the step.
        """

    def observe(self, request_id: str, drafted: int, accepted: int) -> None:
        """A step has taken `drafted` guessed tokens of a request and kept the first `accepted` ones."""
