"""Describes how a request's next token is sampled; the scheduler sends it with each step. Pure."""

from typing import NamedTuple

from baton.core.sampling import ResolvedSampling
from baton.engine.request import IntArray, int_array

# Shared by all rows without penalties; nobody writes to it.
_NO_HISTORY = int_array()


class SampleRow(NamedTuple):
    """How to draw one row's next token.

    Args:
        params: the request's parameters; with a seed, unless the request is greedy.
        output_index: the token's position in the output; it determines the draw together with the seed.
        forbidden: token ids that must not be drawn for this token.
        history: prompt and output that the host knows, for a request with penalties; else empty. It lacks the token of
            a row with a `token_source`, which penalties count as well.
        prompt_tokens: how many tokens of `history` are prompt.
        output: all output tokens before this one, for a request with a grammar; empty for a row with a `token_source`,
            whose output the runner follows.
    """

    params: ResolvedSampling
    output_index: int
    forbidden: tuple[int, ...]
    history: IntArray
    prompt_tokens: int
    output: IntArray = _NO_HISTORY

    @property
    def edits_logits(self) -> bool:
        """Whether the token is drawn from edited logits instead of the model's own."""
        return bool(self.history or self.forbidden or self.params.logit_bias or self.params.grammar)

    def after(self, tokens: IntArray) -> "SampleRow":
        """How the token is drawn that follows these output tokens; the first of them has position `output_index`."""
        output_index = self.output_index + len(tokens)
        return self._replace(
            output_index=output_index,
            forbidden=self.forbidden if output_index < self.params.min_tokens else (),
            history=self.history + tokens if self.history else self.history,
            output=self.output if self.params.grammar is None else self.output + tokens,
        )

    def after_each(self, tokens: IntArray) -> list["SampleRow"]:
        """How the token is drawn after the first of these output tokens, after the first two, and so on."""
        params, index, forbidden, history, prompt_tokens, output = self
        if history or forbidden or params.grammar is not None:
            return [self.after(tokens[: count + 1]) for count in range(len(tokens))]
        return [
            SampleRow(params, index + count, forbidden, history, prompt_tokens, output)
            for count in range(1, len(tokens) + 1)
        ]


# For warm-up steps, for profiles, and for rows whose token is discarded: greedy draws are the fastest.
GREEDY_ROW = SampleRow(ResolvedSampling(temperature=0.0), 0, (), _NO_HISTORY, 0)


class SampleRows:
    """Makes the sample rows of one request.

    Args:
        end_token_ids: forbidden until the output has `min_tokens` tokens.
    """

    def __init__(self, params: ResolvedSampling, *, prompt_tokens: int, end_token_ids: frozenset[int]) -> None:
        self._params = params
        self._prompt_tokens = prompt_tokens
        self._min_tokens = params.min_tokens
        self._forbidden_early = tuple(sorted(end_token_ids))
        self._has_penalties = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )

    def row(self, output_index: int, tokens: IntArray) -> SampleRow:
        """The row that draws the token at `output_index`. `tokens` are prompt and output as far as they are known."""
        forbidden = self._forbidden_early if output_index < self._min_tokens else ()
        history = tokens[:] if self._has_penalties else _NO_HISTORY
        output = _NO_HISTORY
        if self._params.grammar is not None and len(tokens) == self._prompt_tokens + output_index:
            output = tokens[self._prompt_tokens :]
        return SampleRow(self._params, output_index, forbidden, history, self._prompt_tokens, output)
