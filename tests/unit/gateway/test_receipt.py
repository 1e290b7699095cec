"""The receipt describes the final way of the request, and the failures before it."""

from dataclasses import replace

from baton.core.types import Path
from baton.gateway.fleet.node_view import NodeView, PossiblePull
from baton.gateway.fleet.placement import Placement, Route
from baton.gateway.request.receipt import ReceiptDraft
from baton.protos.internal.v1 import decode_pb2, lease_pb2, prefill_pb2

NODE = NodeView("d1", 21, "", True, 1000, 16, 1000, 0, 0, frozenset())


def reserved() -> decode_pb2.Reserved:
    return decode_pb2.Reserved(ticket=lease_pb2.Ticket(token_start=16, token_stop=100), cached_tokens=16, queue_s=0.5)


def remote() -> ReceiptDraft:
    draft = ReceiptDraft("zip-1")
    draft.submitted(revision="abc", revision_name="v7", decode_version="2")
    draft.reserved("decode-0", reserved())
    draft.calling("prefill-0", "cma", "bfloat16 to float8_e4m3fn", "1")
    draft.scheduled(prefill_pb2.PrefillScheduled(queue_s=0.25, cached_tokens=32))
    draft.prefilled(0.125)
    return draft


def test_the_receipt_describes_a_remote_prefill() -> None:
    draft = remote()
    draft.sent(
        prefill_pb2.PrefillSent(
            tokens_sent=84, bytes_sent=4096, segments=2, transport="tcp", segment_bytes=3072, layer_groups=3
        )
    )
    draft.admitted(decode_pb2.Admitted(transfer_s=0.01, bytes_received=4096, segments=2))
    receipt = draft.finish(ttft_s=1.0, total_s=2.0)
    assert (receipt.request_id, receipt.path) == ("zip-1", Path.REMOTE)
    assert receipt.why == "prompt prefilled on prefill-0"
    assert (receipt.prefill_node, receipt.decode_node, receipt.transport) == ("prefill-0", "decode-0", "tcp")
    assert (receipt.prompt_tokens_sent, receipt.bytes_sent, receipt.segments) == (84, 4096, 2)
    assert (receipt.segment_bytes, receipt.layer_groups) == (3072, 3)
    assert receipt.kv_converted == "bfloat16 to float8_e4m3fn"
    assert (receipt.queue_s, receipt.prefill_s, receipt.transfer_s) == (0.75, 0.125, 0.01)
    assert (receipt.attempts, receipt.prefill_cached_tokens, receipt.decode_cached_tokens) == (1, 32, 16)
    assert (receipt.revision, receipt.revision_name) == ("abc", "v7")
    assert (receipt.prefill_version, receipt.decode_version) == ("1", "2")


def test_the_receipt_names_the_pull_for_which_the_prefill_node_was_chosen() -> None:
    pull = PossiblePull(384, 256, 0.02, 0.25, "decode-1")
    pulling = replace(NODE, name="prefill-0").with_pull(pull).computing
    words = "pulls 256 tokens from decode-1 in about 0.02 s, and would compute them in 0.25 s"
    for called, why in (
        ("prefill-0", f"prompt prefilled on prefill-0, which {words}"),
        ("p1", "prompt prefilled on p1"),
    ):
        draft = ReceiptDraft()
        draft.placed(Placement(Route.REMOTE, NODE, pulling, 0, "", 0.5), waited_s=0.0)
        draft.calling(called, "cma", "")
        assert draft.finish(ttft_s=1.0, total_s=2.0).why == why


def test_without_the_prefill_nodes_count_the_decode_nodes_is_used() -> None:
    draft = remote()
    draft.admitted(decode_pb2.Admitted(bytes_received=4096, segments=3))
    receipt = draft.finish(ttft_s=1.0, total_s=2.0)
    assert (receipt.prompt_tokens_sent, receipt.bytes_sent, receipt.segments) == (84, 4096, 3)
    assert (receipt.transport, receipt.kv_converted) == ("cma", "bfloat16 to float8_e4m3fn")


def test_a_local_prefill_after_a_failure_has_nothing_of_the_hand_over() -> None:
    draft = remote()
    draft.failed("prefill-0 failed (gone)")
    draft.accepted("decode-0", decode_pb2.Accepted(why="no prefill node could do it", cached_tokens=0, queue_s=0.5))
    draft.prefilled(0.75)
    receipt = draft.finish(ttft_s=1.0, total_s=2.0)
    assert receipt.path is Path.LOCAL
    assert receipt.why == "prefill-0 failed (gone), then prompt prefilled on decode-0: no prefill node could do it"
    assert (receipt.prefill_node, receipt.transport, receipt.kv_converted) == ("", "", "")
    assert (receipt.prefill_version, receipt.decode_version) == ("", "2")
    assert (receipt.prompt_tokens_sent, receipt.bytes_sent, receipt.attempts) == (0, 0, 2)
    assert (receipt.queue_s, receipt.prefill_s) == (0.5, 0.75)


def test_cached_tokens_are_those_that_the_computing_node_had() -> None:
    draft = remote()
    assert draft.cached_tokens == 32, "the prefill node computed the others, also where the decode node had them"
    draft.accepted("decode-0", decode_pb2.Accepted(why="the prefill node is lost", cached_tokens=48))
    assert draft.cached_tokens == 48


def test_cached_tokens_of_a_prompt_whose_prefill_node_had_fewer_than_the_decode_node() -> None:
    draft = ReceiptDraft()
    draft.reserved("decode-0", reserved())
    draft.calling("prefill-0", "cma", "")
    draft.scheduled(prefill_pb2.PrefillScheduled(cached_tokens=0))
    receipt = draft.finish(ttft_s=1.0, total_s=2.0)
    assert (draft.cached_tokens, receipt.prefill_cached_tokens, receipt.decode_cached_tokens) == (0, 0, 16)


def test_drafts_of_all_decode_nodes_are_added_up() -> None:
    draft = remote()
    draft.drafted(5, 3)
    draft.reserved("decode-1", reserved())  # after the first one was lost
    draft.drafted(2, 0)
    receipt = draft.finish(ttft_s=1.0, total_s=2.0)
    assert (receipt.drafted_tokens, receipt.accepted_tokens) == (7, 3)
