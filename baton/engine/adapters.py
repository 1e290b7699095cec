"""Assigns adapters to the device's slots. Pure.

An adapter that is unloaded or replaced by another revision keeps its slot while requests use it; new requests do not
get it.
"""

from collections.abc import Callable

from baton.core.errors import Overloaded, UnknownModel
from baton.core.types import AdapterRef


class AdapterSlots:
    """The adapter in each of a model's slots.

    Args:
        count: number of slots.
        in_use: whether a request uses the adapter in a slot.

    Attributes:
        known: the adapters that have been loaded so far.
    """

    def __init__(self, count: int, in_use: Callable[[int], bool]) -> None:
        self.count = count
        self._in_use = in_use
        self._slots: dict[AdapterRef, int] = {}
        self._filling: set[int] = set()
        self.known: set[AdapterRef] = set()

    @property
    def loaded(self) -> list[AdapterRef]:
        """The adapters that requests may use, sorted by name."""
        return sorted(self._slots)

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return self._free() is None

    def slot_of(self, adapter: AdapterRef) -> int:
        """The slot of a loaded adapter.

        Raises:
            UnknownModel: it is not loaded.
        """
        slot = self._slots.get(adapter)
        if slot is None:
            raise UnknownModel(
                f"the adapter {adapter.name} of revision {adapter.revision} is not loaded here",
                field="model",
                value=adapter.name,
                allowed=tuple(each.name for each in self.loaded),
                cure="load it, or ask a node that has it",
            )
        return slot

    def take(self) -> int:
        """Claims a free slot; call `filled` or `failed` next.

        Raises:
            Overloaded: no slot is free.
        """
        slot = self._free()
        if slot is not None:
            self._filling.add(slot)
            return slot
        raise Overloaded(
            f"all {self.count} slots for adapters are in use: {', '.join(each.name for each in self.loaded)}",
            field="max_adapters",
            value=self.count,
            cure="unload one, or give the node a larger --max-adapters",
        )

    def filled(self, slot: int, adapter: AdapterRef) -> None:
        """Lets requests use the adapter in `slot`. It replaces other revisions of its name."""
        self._filling.discard(slot)
        self.unload(adapter.name)
        self._slots[adapter] = slot
        self.known.add(adapter)

    def failed(self, slot: int) -> None:
        self._filling.discard(slot)

    def unload(self, name: str) -> bool:
        """Offers the adapter to no new request. Returns whether it was loaded."""
        known = [adapter for adapter in self._slots if adapter.name == name]
        for adapter in known:
            del self._slots[adapter]
        return bool(known)

    def _free(self) -> int | None:
        taken = {*self._slots.values(), *self._filling}
        return next((slot for slot in range(self.count) if slot not in taken and not self._in_use(slot)), None)
