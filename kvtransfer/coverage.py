"""Tracks which cells (layer, token, head) of a lease have been claimed, each at most once. Pure; no torch."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class _Claim:
    """A rectangle of tokens and heads in one layer."""

    token_start: int
    token_stop: int
    head_start: int
    head_stop: int

    def overlaps(self, other: "_Claim") -> bool:
        tokens = self.token_start < other.token_stop and other.token_start < self.token_stop
        return tokens and self.head_start < other.head_stop and other.head_start < self.head_stop


class Coverage:
    """Claims of one lease. Adjacent claims of the same heads are merged, so that in-order arrival stays cheap."""

    def __init__(self, num_layers: int) -> None:
        self._claims: list[list[_Claim]] = [[] for _ in range(num_layers)]

    def claim(self, layers: range, token_start: int, token_stop: int, heads: range) -> bool:
        """Claims all cells of a box. Returns False and claims none if one of them has been claimed before."""
        claim = _Claim(token_start, token_stop, heads.start, heads.stop)
        if any(claim.overlaps(other) for layer in layers for other in self._claims[layer]):
            return False
        for layer in layers:
            self._claims[layer] = _joined(self._claims[layer], claim)
        return True


def _joined(claims: list[_Claim], claim: _Claim) -> list[_Claim]:
    apart = []
    for other in claims:
        same_heads = (other.head_start, other.head_stop) == (claim.head_start, claim.head_stop)
        if same_heads and other.token_stop == claim.token_start:
            claim = replace(claim, token_start=other.token_start)
        elif same_heads and claim.token_stop == other.token_start:
            claim = replace(claim, token_stop=other.token_stop)
        else:
            apart.append(other)
    return [*apart, claim]
