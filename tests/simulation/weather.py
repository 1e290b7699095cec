"""What may happen to a KV segment on its way, whoever sends it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Weather:
    """Shares of all segments.

    Attributes:
        duplicated: come twice.
        late: come once more, long afterwards, at whoever has the address then.
        damaged: come with other bytes.
    """

    duplicated: float = 0.0
    late: float = 0.0
    damaged: float = 0.0
