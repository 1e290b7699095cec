"""The prefix cache block numbers of one prompt. Pure."""

from collections.abc import Sequence

from baton.core.block_keys import BlockNumbers, adapted_identity
from baton.core.types import AdapterRef


class PromptBlocks:
    """Block numbers of one request's prompt, computed once for each kind of cache among the nodes."""

    def __init__(self, prompt: Sequence[int], *, cache_salt: str, adapter: AdapterRef | None = None) -> None:
        self._prompt = prompt
        self._adapter = adapter
        self._cache_salt = cache_salt
        self._numbers: dict[tuple[str, int], BlockNumbers] = {}

    def numbers(self, identity: str, block_size: int) -> BlockNumbers:
        """The numbers that nodes with this cache identity and block size use."""
        known = self._numbers.get((identity, block_size))
        if known is None:
            known = BlockNumbers(
                self._prompt,
                identity=adapted_identity(identity, self._adapter),
                cache_salt=self._cache_salt,
                block_size=block_size,
            )
            self._numbers[identity, block_size] = known
        return known
