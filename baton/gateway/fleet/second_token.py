"""Learns how long after the first token of a hand-over its second one comes, and how long the first should wait for it.
Pure.

The first token comes from a prefill node, and the second one from a decode node: once it has all KV, its present step
has ended, and the next one too. That is a gap of up to three steps. If the first token waits for a part of this time,
the gap is no longer than later ones.
"""

from math import inf

from baton.core.types import Objective, Slo

# A longer delay teaches as much as this one.
_DELAY_S_MAX = 0.1
# Each hand-over moves the delay towards its own by about so much, or by this share of it.
_STEP_S, _STEP_SHARE = 0.00025, 1 / 16
# Of the first hand-overs, so many, the shortest delay is taken: the first one may connect nodes and compile kernels.
_FIRST = 4
# Share of the second tokens that come earlier than the delay says: bench/results/smooth_starts.md compares others.
_EARLIER = 0.75
# Half of the delay is forgotten in this time. Every hand-over shows it again, so this counts only where there are none.
_HALF_LIFE_S = 600.0
# A shorter wait changes nothing that a client could see; a longer one would no longer feel like a start.
HOLD_S_MIN, _HOLD_S_MAX = 1e-3, 0.05
# A first token that waits still comes within this share of the TTFT.
_TTFT_USED = 0.9


class SecondTokenDelay:
    """Time from the arrival of the first token at a gateway to that of the second one, from one decode node.

    It is a quantile of the delays, so a few that were much longer hardly change it.

    Args:
        incarnation: of the node. What was learned from another one is forgotten.
        memory: four numbers that all processes of the gateway share, so that one hand-over teaches all. If two of them
            learn at the same moment, one hand-over may not count. None: there is one process.
    """

    def __init__(self, incarnation: int = 0, memory: "memoryview[float] | None" = None) -> None:
        # The incarnation, the delay, the time of the last hand-over, and the number of hand-overs up to `_FIRST`.
        self._memory: list[float] | memoryview[float] = [0.0] * 4 if memory is None else memory
        self._incarnation = float(incarnation)
        if self._memory[0] != self._incarnation:
            for column, number in enumerate((self._incarnation, 0.0, 0.0, 0.0)):
                self._memory[column] = number

    def at(self, now_s: float) -> float:
        """The delay as it is known now; 0 if none was seen. It fades without hand-overs."""
        _, seconds, shown_s, _ = self._memory
        return float(seconds * 0.5 ** (max(0.0, now_s - shown_s) / _HALF_LIFE_S))

    def add(self, delay_s: float, now_s: float) -> None:
        """Records the delay of one hand-over; 0 if the second token came first."""
        if self._memory[0] != self._incarnation:
            return  # another process knows already that the node has restarted
        present_s, count = self.at(now_s), self._memory[3]
        self._memory[2] = now_s
        if count < _FIRST:
            self._memory[1] = min(delay_s, present_s if count else _DELAY_S_MAX)
            self._memory[3] = count + 1
            return
        step_s = 2 * max(_STEP_S, _STEP_SHARE * present_s)
        found_s = present_s + (_EARLIER * step_s if delay_s > present_s else (_EARLIER - 1) * step_s)
        self._memory[1] = min(max(0.0, found_s), _DELAY_S_MAX)


def longest_gap_s(plain_s: float, slo: Slo, objective: Objective) -> float:
    """The longest gap between two tokens that a request expects.

    Args:
        plain_s: time of a step without prompts on its decode node; infinite: unknown. No gap is shorter.
    """
    if slo.tpot_s is None:
        return objective.gap_factor * plain_s
    return slo.tpot_s if plain_s == inf else max(slo.tpot_s, plain_s)


def hold_s(delay_s: float, gap_s: float, slo: Slo, *, waited_s: float) -> float:
    """How long a first token waits, so that the second one, after `delay_s`, follows within `gap_s`; 0: not at all.

    Args:
        waited_s: time from the request's arrival until now.
    """
    left_s = inf if slo.ttft_s is None else _TTFT_USED * slo.ttft_s - waited_s
    found_s = min(delay_s - gap_s, left_s, _HOLD_S_MAX)
    return found_s if found_s >= HOLD_S_MIN else 0.0
