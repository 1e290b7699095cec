"""The model of the simulation: the tokens that one process alone computes. Pure.

The KV of a token is a number that stands for the token, all tokens before it, and the layer. The next token depends on
all of them, so one wrong cell changes the output.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from baton.core.types import FinishReason, PromptLogprob

VOCAB_SIZE = 64
EOS = 63
MAX_CONTEXT_TOKENS = 40
NUM_LAYERS = 2
EMPTY = 0  # the state before the first token
UNWRITTEN = -1

_MASK = (1 << 62) - 1


def follow(state: int, token: int) -> int:
    """The state after one more token."""
    return (state * 6364136223846793005 + token * 1442695040888963407 + 1013904223) & _MASK


def states_of(tokens: Iterable[int]) -> list[int]:
    """The state after each token."""
    states, state = [], EMPTY
    for token in tokens:
        state = follow(state, token)
        states.append(state)
    return states


def kv(state: int, layer: int) -> int:
    """The content of a cell of that layer for the last token of the prefix."""
    return state ^ layer


def next_token(state: int) -> int:
    """Greedy: a function of the whole prefix."""
    return (state >> 23) % VOCAB_SIZE


def prompt_logprob(state: int, target: int, alternatives: int) -> PromptLogprob:
    """The logprob of `target` after the prefix, and the alternatives: functions of the whole prefix."""
    top = tuple((token, -float((state >> 5) % 89 + token)) for token in range(alternatives))
    return PromptLogprob(target, -float((state >> 11) % 97 + target), top)


def prompt_logprobs(prompt: Sequence[int], alternatives: int) -> list[PromptLogprob]:
    """What a client must get of its prompt."""
    scored = zip(states_of(prompt), prompt[1:], strict=False)
    return [PromptLogprob(prompt[0], None), *(prompt_logprob(state, token, alternatives) for state, token in scored)]


class Output(NamedTuple):
    tokens: tuple[int, ...]
    finish_reason: FinishReason


def generate(prompt: Sequence[int], max_tokens: int, context_tokens: int) -> Output:
    """The output that every client must see.

    Args:
        context_tokens: longest prompt plus output of a decode node.
    """
    state, output = EMPTY, list[int]()
    for token in prompt:
        state = follow(state, token)
    while True:
        token = next_token(state)
        output.append(token)
        if token == EOS:
            return Output(tuple(output), FinishReason.STOP)
        if len(output) == max_tokens or len(prompt) + len(output) >= context_tokens:
            return Output(tuple(output), FinishReason.LENGTH)
        state = follow(state, token)
