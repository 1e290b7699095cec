"""What may happen to a KV segment on its way, from any sender."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Weather:
    """Probabilities for each segment.

    Attributes:
        duplicated: it arrives twice.
        late: it arrives once more, long afterwards, at the process that has the address then.
        damaged: it arrives with other bytes.
        late_s: longest delay of a late segment.
    """

    duplicated: float = 0.0
    late: float = 0.0
    damaged: float = 0.0
    late_s: float = 1.5
