"""Requests whose KV comes from elsewhere: their blocks are reserved until they decode, or until the rest of their
prompt is computed here. Pure."""

from collections.abc import Sequence

from baton.core.types import FinishReason, TokenOutput
from baton.engine.request import EngineRequest, ModelFacts, Reservation
from baton.engine.request_checks import check_first_token, check_received
from baton.engine.scheduling.drafts import Drafts
from baton.engine.scheduling.request_table import RequestTable, overloaded
from baton.engine.scheduling.state import NO_END, RequestPhase


class Reservations:
    """The reserved requests of one scheduler, each from `reserve` until `admit`, `prefill_here` or `Scheduler.abort`.

    Args:
        drafts: None: no step has drafts.
    """

    def __init__(self, requests: RequestTable, drafts: Drafts | None, facts: ModelFacts) -> None:
        self._requests = requests
        self._roster = requests.roster
        self._blocks = requests.blocks
        self._drafts = drafts
        self._vocab_size = facts.vocab_size
        self._block_size = facts.block_size
        self._max_context_tokens = requests.max_context_tokens

    def reserve(self, request: EngineRequest, now: float, *, arriving_tokens: int = 0) -> Reservation:
        """Holds all blocks of a request whose KV comes from elsewhere. No other request matches them.

        Args:
            arriving_tokens: number of leading tokens whose KV will arrive, with the state after them; 0: all tokens.

        Raises:
            InvalidRequest: it could never run.
            Overloaded: no room next to the running requests and those that wait before it, or no seat for one more
                reserved request.
        """
        assert not request.prefill_only, "a reserved request decodes here"
        state = self._requests.new_state(request, now)
        if not self._roster.may_reserve:
            ready, reserved = len(self._roster.ready), self._roster.num_reserved
            raise overloaded(f"{ready} requests wait for a seat with all their KV, and {reserved} for their KV")
        if not self._requests.in_stream_share(state):
            raise overloaded("the rest of the seats and blocks is for prompts of requests that decode elsewhere")
        place = self._requests.find_place(state, arriving_tokens=arriving_tokens or state.num_tokens)
        if place is None:
            raise overloaded("no room for the request's blocks")
        self._blocks.take(state, place)
        self._roster.enter(state, RequestPhase.RESERVED)
        return self._blocks.reservation(state)

    def extend(self, request_id: str, output: tuple[int, ...]) -> Reservation:
        """Extends a reservation by tokens that were sampled elsewhere. `output` is the whole output so far; blocks may
        be added.

        Raises:
            UnknownLease: no such reservation.
            InvalidRequest: `output` does not continue what the request had, or leaves nothing to decode.
            Overloaded: no block left; the reservation stays as it was.
        """
        state = self._requests.reserved(request_id)
        state.check_continuation(output, vocab_size=self._vocab_size, max_context_tokens=self._max_context_tokens)
        if not self._blocks.extend(state, len(state.request.prompt) + len(output) + 1):
            raise overloaded("no room for another block")
        state.replace_output(output)
        return self._blocks.reservation(state)

    def admit(
        self, request_id: str, first: TokenOutput, drafts: Sequence[int] = (), *, has_draft: bool = True
    ) -> FinishReason | None:
        """Lets a reserved request decode after `first`, once the KV of all its known tokens has arrived. It runs as
        soon as a seat is free.

        Args:
            drafts: for the tokens after `first`, from the node that computed the prompt.
            has_draft: KV of layers that draft tokens has arrived too, if the model has such layers here.

        Returns the reason when `first` is also the last token; then the request has ended and its blocks are free.

        Raises:
            UnknownLease: no such reservation.
            InvalidRequest: `first` is not the request's next token.
        """
        state = self._requests.reserved(request_id)
        check_first_token(first, index=state.num_output, vocab_size=self._vocab_size)
        if self._drafts is not None and not has_draft:
            self._drafts.lacks_layer_kv(state)
        self._blocks.fill(state)
        if (end := state.append(first.token_id)) is not NO_END:
            self._requests.end(state)
        else:
            self._requests.begin(state)
            self._roster.make_ready(state)
            if self._drafts is not None and all(0 <= token < self._vocab_size for token in drafts):
                self._drafts.take_layer_drafts(state, drafts)
            self._requests.fill_seats()
        return end.reason

    def prefill_here(
        self,
        request_id: str,
        output: tuple[int, ...],
        now: float,
        *,
        received_tokens: int = 0,
        has_draft: bool = True,
    ) -> None:
        """Computes a reserved request's tokens from `Reservation.restart_at` on here. `output` is its whole output so
        far.

        Args:
            received_tokens: number of leading tokens whose KV is in the request's blocks, cached or received; layers
                with a sliding window may lack what a computation from the lesser of `Reservation.resume_at` and this
                number does not read. A multiple of the block size; 0: none has arrived.
            has_draft: as in `admit`.

        Raises:
            UnknownLease: no such reservation.
            InvalidRequest: `output` does not continue what the request had, or leaves nothing to decode;
                `received_tokens` cannot be right.
        """
        state = self._requests.reserved(request_id)
        state.check_continuation(output, vocab_size=self._vocab_size, max_context_tokens=self._max_context_tokens)
        check_received(state.request, received_tokens, stop=state.num_tokens, multiple=self._block_size)
        if has_arrived := received_tokens > state.num_cached:
            if self._drafts is not None and not has_draft:
                self._drafts.lacks_layer_kv(state)
            self._blocks.fill_part(state, received_tokens)
        state.replace_output(output)
        state.score_prompt()
        state.waited_s += now - state.queued_at
        state.queued_at = now
        # NOTE: cached blocks are shared, so a prompt whose first tokens must be computed again needs others. A state in
        # the request's own slot may have been overwritten by what arrived.
        lost = state.num_computed > state.reusable_tokens or state.restore_from == state.state_slot >= 0
        lost = lost or not (has_arrived or self._blocks.restart(state))
        if lost or not self._blocks.extend(state, state.num_tokens + 1):
            self._requests.preempt(state, now)
        else:
            self._roster.make_ready(state)
            self._requests.fill_seats()
