"""Records what a client saw of one request, and derives its times. Pure.

All times count from the moment when the request was due, so a client that sends late cannot make a server look fast.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np


class LoadOutcome(StrEnum):
    OK = "ok"
    REFUSED = "refused"  # the server said that it has no room now, and did nothing else
    FAILED = "failed"  # any other error
    UNFINISHED = "unfinished"  # still running when the run's time was over


@dataclass(frozen=True)
class LoadRecord:
    """One request.

    Args:
        due_s: when it was due, after the run's start.
        late_s: how long after `due_s` the client sent it.
        prompt_tokens, output_tokens: the planned numbers.
        error: type of the error; "": none. `detail` is its message.
        times_s, counts: when each message with tokens arrived, and how many tokens it had.
        end_s: when the answer ended.
        usage: the server's own numbers: `prompt`, `cached`, `output`.
        exact: whether `counts` are the server's; if not, each message counts as one token.
        receipt: the receipt of a Baton gateway.
    """

    index: int
    due_s: float
    late_s: float
    prompt_tokens: int
    output_tokens: int
    outcome: LoadOutcome
    end_s: float
    error: str = ""
    detail: str = ""
    times_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    usage: Mapping[str, int] = field(default_factory=dict)
    exact: bool = True
    request_id: str = ""
    receipt: Mapping[str, object] = field(default_factory=dict)
    counted: bool = True

    @property
    def tokens(self) -> int:
        """Tokens of output: the counted ones if they are exact, else the usage's, else the number of messages."""
        return sum(self.counts) if self.exact else self.usage.get("output", sum(self.counts))

    @property
    def ttft_s(self) -> float | None:
        return self.times_s[0] if self.times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first. Returns None for fewer than two tokens."""
        return (self.times_s[-1] - self.times_s[0]) / (self.tokens - 1) if self.times_s and self.tokens > 1 else None

    def gaps_s(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The time before each token after the first.

        Tokens of one message come at once: the first of them has the gap to the message before, the others have 0. So
        the gaps are as many as tokens less one, and their sum is the time from first to last token.
        """
        times = np.repeat(np.asarray(self.times_s, np.float64), np.asarray(self.counts, np.int64))
        return np.diff(times)

    def gap_quantile_s(self, quantile: float) -> float | None:
        """A quantile of this request's own gaps."""
        gaps = self.gaps_s()
        return float(np.quantile(gaps, quantile)) if gaps.size else None
