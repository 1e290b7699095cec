"""What a lease covers: which tokens of a request a prefill node sends, and into which blocks. Pure."""

from dataclasses import dataclass

from baton.engine.request import Reservation
from baton.protos.internal.v1 import lease_pb2
from decode_node.rules import DecodeRules
from kvtransfer.leases import LeaseGrant


@dataclass(frozen=True)
class LeaseOffer:
    """One lease of a request, with what the transfer and the prefill node get of it.

    Args:
        number: of the lease.
        split_tokens: length of a split prompt's first part, which alone is sent; 0: the prompt is not split.
        num_tokens: prompt and output so far.
        prefill_incarnation: of the node that may fill the lease; 0: any one.
    """

    number: int
    reservation: Reservation
    split_tokens: int
    num_tokens: int
    prefill_incarnation: int
    rules: DecodeRules

    @property
    def token_stop(self) -> int:
        """The tokens before this one come from a prefill node."""
        return self.split_tokens or self.num_tokens

    @property
    def resume_at(self) -> int:
        """The first position that may still be computed: all full blocks of the lease may be shared."""
        if not self.split_tokens:
            return self.reservation.resume_at
        return max(self.reservation.cached_tokens, self.split_tokens - self.rules.block_size + 1)

    def grant(self) -> LeaseGrant:
        return LeaseGrant(
            number=self.number,
            block_ids=self.reservation.block_ids,
            token_start=self.reservation.cached_tokens,
            token_stop=self.token_stop,
            resume_at=self.resume_at,
            prefill_incarnation=self.prefill_incarnation,
            key=self.rules.lease_key(self.number),
            state_slot=self.reservation.state_slot,
            owner=self.reservation.owner,
        )

    def ticket(self) -> lease_pb2.Ticket:
        return lease_pb2.Ticket(
            lease=lease_pb2.Lease(
                number=self.number,
                incarnation=self.rules.incarnation,
                remaining_s=self.rules.lease_s,
                key=self.rules.lease_key(self.number),
            ),
            decode_node=self.rules.name,
            decode_address=self.rules.address,
            token_start=self.reservation.cached_tokens,
            token_stop=self.token_stop,
            resume_at=self.resume_at,
            first_part=self.split_tokens > 0,
            owner_rank=self.reservation.owner,
        )
