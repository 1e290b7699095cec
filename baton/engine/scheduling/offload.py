"""The entries of one engine's cache: what is saved to the stores outside of it, and loaded from there. Pure."""

from collections.abc import Sequence

from baton.core.block_keys import KeyChain, adapted_identity
from baton.core.kv_entries import ENTRY_TOKENS
from baton.engine.request import EngineRequest
from baton.engine.scheduling.block_manager import BlockManager
from baton.engine.scheduling.entry_loads import EntryLoads
from baton.engine.scheduling.entry_plans import WantedPrefix
from baton.engine.scheduling.entry_saves import EntrySaves
from baton.engine.scheduling.kept_blocks import KeptBlocks
from baton.engine.scheduling.state_slots import StateSlots


class Offload:
    """Both directions of the traffic with stores, and what the stores are known to have.

    Args:
        slots: of recurrent states; None: the model has none.
        has_owners: whether each pool belongs to one rank.

    Attributes:
        kept: the blocks of saved entries.
        has_states: whether the model has recurrent states.
    """

    def __init__(
        self,
        pools: Sequence[BlockManager],
        slots: StateSlots | None = None,
        *,
        identity: str,
        block_size: int,
        has_owners: bool,
    ) -> None:
        self.has_states = slots is not None
        self.kept = KeptBlocks(block_size)
        self.saves = EntrySaves(
            pools, slots, self.kept, block_size=block_size, has_owners=has_owners, entry_keys=self.entry_keys
        )
        self.loads = EntryLoads(pools, slots, self.kept, block_size=block_size, has_owners=has_owners)
        self._identity = identity
        self._has_owners = has_owners

    @property
    def num_held(self) -> int:
        """References to blocks that copies hold."""
        return self.saves.num_held + self.loads.num_held

    def entry_keys(self, request: EngineRequest) -> KeyChain:
        """The keys of a request's entries, in a chain that its output may extend."""
        return self.given_entry_keys(request).copy()

    def given_entry_keys(self, request: EngineRequest) -> KeyChain:
        """The keys of the entries that a request has when it arrives."""
        identity = adapted_identity(self._identity, request.adapter)
        return request.chains.of(identity=identity, cache_salt=request.cache_salt, block_size=ENTRY_TOKENS)

    def may_have(self, wanted: WantedPrefix) -> bool:
        """Whether an entry was saved or loaded here that continues what is cached. Where blocks have owners it always
        may be: what one rank has evicted, another may have."""
        if self._has_owners:
            return True
        starts = (start for start in wanted.starts if start < wanted.stop)
        return any(self.kept.has(wanted.entries(start, start + 1)[0]) for start in starts)

    def drop_roots(self, roots: frozenset[bytes]) -> None:
        """Forgets all entries with one of these roots. What is being loaded of them will not be added to the prefix
        cache."""
        self.saves.drop_roots(roots)
        self.loads.drop_roots(roots)
        self.kept.lost_roots(roots)
