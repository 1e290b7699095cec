"""Settings of one rank's KV transfer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from baton.core.errors import ConfigError
from baton.kvcache.spec import KVCacheSpec
from kvtransfer.parts import Part, parts_of
from kvtransfer.segments import TRAILER_BYTES
from kvtransfer.stores.entry import EntryLayout
from kvtransfer.stores.store import Store

# Opens a store for one rank's entries, which have that layout.
OpenStore: TypeAlias = Callable[[EntryLayout], Store]


@dataclass(frozen=True, kw_only=True)
class TransferSettings:
    """The settings of one rank's transfer.

    Attributes:
        incarnation: of the node; segments for another one are refused.
        transport: a name of `kvtransfer.transports.table`.
        segment_bytes: largest payload of one message; a staging slot holds it and its trailer.
        staging_slots: number of slots, for each direction that is used.
        digests: segments are sent with a digest, and refused without the right one.
        receive_bytes_per_s: highest average rate of received segments; senders wait. None: no limit.
        peers_are_known: every peer has shown a certificate, so its address is used without a trial.
        heads: for each part, the model's heads that the rank's cache holds; empty: all of them.
        host_cache_bytes: host memory for entries; 0: none are kept.
        stores: below host memory, asked in this order.

    Raises:
        ConfigError: there are no staging slots.
    """

    incarnation: int
    transport: str
    segment_bytes: int
    staging_slots: int
    digests: bool
    receive_bytes_per_s: float | None = None
    peers_are_known: bool = False
    heads: tuple[range, ...] = ()
    host_cache_bytes: int = 0
    stores: tuple[OpenStore, ...] = ()

    def __post_init__(self) -> None:
        if self.staging_slots < 1:
            raise ConfigError(
                f"staging_slots is {self.staging_slots}",
                field="staging_slots",
                value=self.staging_slots,
                allowed=("an integer of at least 1",),
            )

    @property
    def message_bytes(self) -> int:
        """The largest message, which is the size of a staging slot."""
        return self.segment_bytes + TRAILER_BYTES

    def parts(self, spec: KVCacheSpec) -> tuple[Part, ...]:
        """The parts of a rank whose cache has that spec."""
        return parts_of(spec, self.heads)
