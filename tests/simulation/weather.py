"""What may happen to a KV segment on its way, whoever sends it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Weather:
    """Shares of all segments.

    Attributes:
        duplicated: come twice.
        late: come once more, long afterwards, at whoever has the address then.
        damaged: come with other bytes.
        late_s: how long afterwards at most, in seconds.
    """

    duplicated: float = 0.0
    late: float = 0.0
    damaged: float = 0.0
    late_s: float = 1.5
