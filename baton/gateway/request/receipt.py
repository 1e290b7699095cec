"""Collects the data of one request's receipt. Pure."""

from typing import NamedTuple

from baton.core.errors import BatonError
from baton.core.types import NOTHING_LOADED, Path, Receipt
from baton.gateway.fleet.placement import Placement
from baton.metrics.declared import LOST
from baton.protos.internal.v1 import decode_pb2, lease_pb2, prefill_pb2
from baton.rpc.convert import loaded_from_proto

PREFILL, DECODE = "prefill", "decode"


class Retry(NamedTuple):
    """An attempt that failed and was followed by another one.

    Args:
        stage: role of the node that failed: PREFILL or DECODE.
        reason: reason of the node's error, or LOST.
    """

    stage: str
    reason: str


class ReceiptDraft:
    """A receipt that the nodes' answers fill in. A later hand-over overwrites the values of a failed one.

    Attributes:
        retries: failures of nodes, for metrics.
    """

    def __init__(self, request_id: str = "") -> None:
        self.attempts = 0
        self._request_id = request_id
        self._decode_cached_tokens = self._decode_loaded_tokens = 0
        self._decode_loaded = NOTHING_LOADED
        self._path = Path.LOCAL
        self._path_why = ""
        self.retries: list[Retry] = []
        self._failures: list[str] = []
        self._prefill_node = ""
        self._decode_node = ""
        self._prefill_version = self._decode_version = ""
        self._revision = self._revision_name = ""
        self._transport = ""
        self._kv_converted = ""
        self._ticket = lease_pb2.Ticket()
        self._decode_queue_s = 0.0
        self._predicted_ttft_s: float | None = None
        self._overhead_s = 0.0  # of that
        self._placement_why = ""
        self._pulling = "", ""  # the prefill node that was chosen, and what it pulls
        self._split_tokens = 0
        self._drafted_tokens = self._accepted_tokens = 0
        self._first_token_came_s: float | None = None  # from the request's arrival, if it was to wait then
        self._forget_prefill()

    def placed(self, placement: Placement, *, waited_s: float) -> None:
        """Records the placement. `waited_s` is the time from the request's arrival until now."""
        predicted_s = placement.predicted_ttft_s
        self._predicted_ttft_s = None if predicted_s is None else waited_s + predicted_s
        self._overhead_s = placement.overhead_s
        self._placement_why = placement.reason
        self._pulling = ("", "") if placement.prefill is None else (placement.prefill.label, placement.prefill_pull)

    def submitted(self, *, revision: str, revision_name: str, decode_version: str) -> None:
        """Records the revision and version of the decode node, which its answers do not contain."""
        self._revision, self._revision_name = revision, revision_name
        self._decode_version = decode_version

    def failed(self, what: str, stage: str = "", error: BatonError | None = None) -> None:
        """Records a failure after which the request is tried again.

        Args:
            stage: role of the node that failed; empty: no node of this gateway failed.
            error: error of the node; None: the node was lost.
        """
        self._failures.append(what)
        if stage:
            self.retries.append(Retry(stage, LOST if error is None else error.reason))

    @property
    def failures(self) -> str:
        """The failures so far, as text."""
        return ", then ".join(self._failures)

    def reserved(self, decode_node: str, message: decode_pb2.Reserved) -> None:
        self._decode_node = decode_node
        self._ticket = message.ticket
        self._decode_cached_tokens, self._decode_loaded_tokens = message.cached_tokens, message.loaded_tokens
        self._decode_loaded = loaded_from_proto(message.loaded)
        self._decode_queue_s = message.queue_s

    def calling(self, prefill_node: str, transport: str, kv_converted: str, version: str = "") -> None:
        """Records the next Prefill call. `transport` and `kv_converted` (how KV is converted) belong to the pair."""
        self.attempts += 1
        if self._ticket.first_part:
            stop, why = self._ticket.token_stop, f": {self._placement_why}" if self._placement_why else ""
            self._path = Path.SPLIT
            self._path_why = f"first {stop} tokens prefilled on {prefill_node}, the rest on {self._decode_node}{why}"
        else:
            chosen, pull = self._pulling
            pulls = f", which {pull}" if pull and prefill_node == chosen else ""
            self._path, self._path_why = Path.REMOTE, f"prompt prefilled on {prefill_node}{pulls}"
        self._split_tokens = self._ticket.token_stop if self._ticket.first_part else 0
        self._prefill_node, self._transport, self._kv_converted = prefill_node, transport, kv_converted
        self._prefill_version = version
        self._forget_prefill()

    def accepted(self, decode_node: str, message: decode_pb2.Accepted) -> None:
        self.attempts += 1
        self._path, self._path_why = Path.LOCAL, f"prompt prefilled on {decode_node}: {message.why}"
        self._decode_node, self._prefill_node, self._transport, self._kv_converted = decode_node, "", "", ""
        self._prefill_version = ""
        self._decode_cached_tokens, self._decode_loaded_tokens = message.cached_tokens, message.loaded_tokens
        self._decode_loaded = loaded_from_proto(message.loaded)
        self._decode_queue_s = message.queue_s
        self._ticket = lease_pb2.Ticket()
        self._split_tokens = 0
        self._forget_prefill()

    def scheduled(self, message: prefill_pb2.PrefillScheduled) -> None:
        self._scheduled = message

    def prefilled(self, prefill_s: float, queue_s: float = 0.0) -> None:
        """Records the computation time of the prompt or of its last part, and its wait in the engine before that."""
        self._prefill_s, self._engine_queue_s = prefill_s, queue_s

    def drafted(self, drafted: int, accepted: int) -> None:
        """Adds the tokens that a step has drafted, and those of them that it kept."""
        self._drafted_tokens += drafted
        self._accepted_tokens += accepted

    def sent(self, message: prefill_pb2.PrefillSent) -> None:
        self._sent = message

    def admitted(self, message: decode_pb2.Admitted) -> None:
        self._admitted = message

    def first_token_waits(self, came_s: float) -> None:
        """Records that the first token, which came `came_s` after the request, waits before it is passed on."""
        self._first_token_came_s = came_s

    @property
    def predicted_steps_s(self) -> float | None:
        """The predicted time to the first token without messages and hand-overs."""
        return None if self._predicted_ttft_s is None else self._predicted_ttft_s - self._overhead_s

    @property
    def path(self) -> Path:
        return self._path

    @property
    def cached_tokens(self) -> int:
        """Number of leading tokens that no node computed.

        Only the cache of the node that computes the prompt's beginning saves work: KV that only the decode node has
        cached is not sent, but the prefill node still computes it.
        """
        return self._decode_cached_tokens if self._path is Path.LOCAL else self._scheduled.cached_tokens

    def finish(self, *, ttft_s: float, total_s: float) -> Receipt:
        """Makes the receipt. If the prefill node's count is missing, the decode node's and the ticket's are used."""
        sent, admitted, came_s = self._sent, self._admitted, self._first_token_came_s
        why = ", then ".join([*self._failures, self._path_why])
        if came_s is not None:
            why += f"; the first token waited {1e3 * (ttft_s - came_s):.1f} ms for the second one"
        return Receipt(
            path=self._path,
            why=why,
            prefill_node=self._prefill_node,
            decode_node=self._decode_node,
            prompt_tokens_sent=sent.tokens_sent or self._ticket.token_stop - self._ticket.token_start,
            bytes_sent=sent.bytes_sent or admitted.bytes_received,
            segments=sent.segments or admitted.segments,
            transport=sent.transport or self._transport,
            queue_s=self._decode_queue_s + self._scheduled.queue_s + self._engine_queue_s,
            prefill_s=sent.prefill_s + self._prefill_s,
            transfer_s=admitted.transfer_s,
            ttft_s=ttft_s,
            total_s=total_s,
            attempts=self.attempts,
            prefill_cached_tokens=self._scheduled.cached_tokens,
            segment_bytes=sent.segment_bytes,
            kv_converted=sent.kv_converted or self._kv_converted,
            layer_groups=sent.layer_groups,
            predicted_ttft_s=self._predicted_ttft_s,
            split_tokens=self._split_tokens,
            revision=self._revision,
            revision_name=self._revision_name,
            prefill_version=self._prefill_version,
            decode_version=self._decode_version,
            decode_cached_tokens=self._decode_cached_tokens,
            request_id=self._request_id,
            prefill_loaded_tokens=self._scheduled.loaded_tokens,
            decode_loaded_tokens=self._decode_loaded_tokens,
            prefill_loaded=loaded_from_proto(self._scheduled.loaded),
            decode_loaded=self._decode_loaded,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
        )

    def _forget_prefill(self) -> None:
        self._scheduled = prefill_pb2.PrefillScheduled()
        self._prefill_s = self._engine_queue_s = 0.0
        self._sent = prefill_pb2.PrefillSent()
        self._admitted = decode_pb2.Admitted()
