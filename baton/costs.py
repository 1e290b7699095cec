"""What engine steps cost: a model with few numbers, fitted to measured steps, that predicts the time of others. Pure.

Four places use it: a node's scheduler sizes the slices of prompts by it, the gateway chooses where a prompt is
prefilled, `baton plan` simulates clusters with it, and it travels in every node's status.

    seconds = dense(tokens) + key_s * keys + pair_s * pairs + decode_row_s * decode rows

`dense` is linear between measured points, because a step of few tokens costs the reading of the weights, however few.
"""

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes.

    Args:
        decode_rows: rows that decode one token each.
        keys: keys that these rows read, the sum of their contexts.
        prompt_tokens: tokens of prompts.
        pairs: pairs of a prompt's token and a key that it sees, over all prompts of the step.
    """

    decode_rows: int = 0
    keys: int = 0
    prompt_tokens: int = 0
    pairs: int = 0

    @property
    def tokens(self) -> int:
        return self.decode_rows + self.prompt_tokens


def chunk_pairs(start: int, stop: int) -> int:
    """Pairs of query and key of a prompt's tokens from `start` to `stop`, each of which sees itself and all before."""
    return (start + stop + 1) * (stop - start) // 2


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The model of one node.

    Args:
        points: tokens and seconds of steps without attention, ascending in both; at least one.
        key_s, pair_s, decode_row_s: seconds for each key that decodes read, for each pair of a prompt, and for each
            decode row in addition to its token.
    """

    points: tuple[tuple[int, float], ...]
    key_s: float = 0.0
    pair_s: float = 0.0
    decode_row_s: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """The predicted time of a step."""
        attention_s = self.key_s * work.keys + self.pair_s * work.pairs
        return self.dense_s(work.tokens) + attention_s + self.decode_row_s * work.decode_rows

    def dense_s(self, tokens: int) -> float:
        """The time of a step's tokens without attention. Below the first point it is that point's; beyond the last one
        it grows as between the last two."""
        points = self.points
        place = bisect_left(points, (tokens, 0.0))
        if place == 0:
            return points[0][1]
        if place == len(points):
            if place == 1:
                return points[0][1] * tokens / points[0][0]
            place -= 1
        (low, low_s), (high, high_s) = points[place - 1 : place + 1]
        return low_s + (high_s - low_s) * (tokens - low) / (high - low)

    def prompt_s(self, start: int, stop: int, *, step_tokens: int) -> float:
        """The time to compute a prompt's tokens from `start` to `stop` alone, in steps of `step_tokens`."""
        tokens = max(0, stop - start)
        whole, rest = divmod(tokens, step_tokens)
        dense_s = whole * self.dense_s(step_tokens) + (self.dense_s(rest) if rest else 0.0)
        return dense_s + self.pair_s * chunk_pairs(start, stop)
