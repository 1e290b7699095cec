"""Which part of a call's cache is computed and not yet sent, as ranges of tokens for each layer. Pure."""

from itertools import chain, groupby

from baton.kvcache.spec import KVCacheSpec
from kvtransfer.segments import SegmentPiece


class Unsent:
    """The tokens [token_start, token_stop) are wanted, in all parts: of a state, its one cell.

    Args:
        spec: its parts' layers are numbered in one row.
    """

    def __init__(self, spec: KVCacheSpec, *, token_start: int, token_stop: int) -> None:
        self._token_stop = token_stop
        self._index_start = spec.num_layers
        self._taken = [part.first_kept(token_start, token_stop) for part in spec.parts for _ in range(part.num_layers)]
        self._computed = self._taken[:]

    def computed(self, token_stop: int, *, layer_stop: int | None = None, index_stop: int = 0) -> None:
        """The cache holds all tokens before `token_stop`, in the layers before `layer_stop` or in all of them; of a
        state, it holds that after `token_stop` tokens only.

        Args:
            index_stop: in how many layers of an index too, where `layer_stop` is given.

        A prompt that is computed again after a preemption takes nothing back.
        """
        token_stop = min(token_stop, self._token_stop)
        index = range(self._index_start, self._index_start + index_stop)
        for layer in range(len(self._computed)) if layer_stop is None else chain(range(layer_stop), index):
            self._computed[layer] = max(self._computed[layer], token_stop)

    def take(self) -> list[SegmentPiece]:
        """All that is computed and was not taken before. Neighbouring layers with equal ranges share a piece."""
        ranges = list(zip(self._taken, self._computed, strict=True))
        self._taken = self._computed[:]
        alike = [(tokens, list(layers)) for tokens, layers in groupby(range(len(ranges)), key=ranges.__getitem__)]
        return [
            SegmentPiece(range(layers[0], layers[-1] + 1), *tokens) for tokens, layers in alike if tokens[0] < tokens[1]
        ]
