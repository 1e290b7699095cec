"""Whether it pays to save KV, by how much of what the cache has lost is asked for again. Pure.

Saved tokens spend credit, and tokens that come back earn it. So where prompts have nothing in common, a node saves as
much as its cache holds, once, and then no more until a prompt returns.
"""

from collections import OrderedDict
from collections.abc import Iterator

from baton.core.block_keys import KeyChain
from baton.core.kv_entries import ENTRY_TOKENS
from baton.engine.request import IntArray

# One token that comes back pays for saving so many. On an H200, saving took up to 3 % of a chat load's time at 18
# tokens a millisecond, and computing a token takes 28 us: about 2 in 100 must come back.
_EARNED = 64
# Each sequence leaves marks after 64 tokens, 256, 1,024 and so on. A chat of 450 tokens has two.
_MARK_FACTOR = 4
_MARKS_MAX = 1 << 16


class SaveCredit:
    """The credit of one engine.

    Args:
        most_tokens: tokens that may be saved before one comes back, which is also the most credit.
        block_size: tokens of a block.

    Attributes:
        tokens: the credit; saving pays while it is above 0.
    """

    def __init__(self, most_tokens: int, block_size: int) -> None:
        self.tokens = self._most = most_tokens
        self._block_size = block_size
        self._first_mark = max(1, ENTRY_TOKENS // block_size)
        # Digests of the blocks before the marks of earlier sequences; the ones used last come last.
        self._seen = OrderedDict[bytes, None]()

    @property
    def pays(self) -> bool:
        return self.tokens > 0

    def saved(self, tokens: int) -> None:
        """Spends credit."""
        self.tokens -= tokens

    def returned(self, tokens: int) -> None:
        """Earns credit for tokens that the stores have given back, or could have."""
        self.tokens = min(self._most, self.tokens + tokens * _EARNED)

    def began(self, keys: KeyChain, tokens: IntArray, *, cached_blocks: int) -> None:
        """Earns credit for what an earlier sequence had of this one, and the cache has lost."""
        known = 0
        for mark in self._marks(len(tokens) // self._block_size):
            if keys.key(mark - 1, tokens).digest not in self._seen:
                break
            known = mark
        if known > cached_blocks:
            self.returned((known - cached_blocks) * self._block_size)

    def ended(self, keys: KeyChain, tokens: IntArray, *, num_blocks: int) -> None:
        """Remembers the first blocks of a sequence, all of which were computed."""
        for mark in self._marks(num_blocks):
            digest = keys.key(mark - 1, tokens).digest
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > _MARKS_MAX:
            self._seen.popitem(last=False)

    def _marks(self, num_blocks: int) -> Iterator[int]:
        mark = self._first_mark
        while mark <= num_blocks:
            yield mark
            mark *= _MARK_FACTOR
