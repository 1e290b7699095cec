"""A split prompt on the decode node: a lease for the first part, then the rest is computed here."""

import pytest

from baton.core.costs import StepCosts
from baton.engine.events import RequestStarted, StepEvents
from baton.protos.internal.v1 import decode_pb2 as pb
from decode_node.commands import CloseLease, OpenLease, PrefillHere
from decode_node.events import HandOverReceived, SessionMessage, StepDone
from decode_node.local_prefill import Streams, local_prefill_reason
from tests.unit.decode_node.scene import SESSION, Scene, names, sent, token


def submit_split(scene: Scene, split_tokens: int, **how: object) -> None:
    """A prompt of 100 tokens."""
    submission = pb.SubmitRequest(
        key=1,
        prompt_token_ids=range(100),
        policy=pb.LOCAL_POLICY_PREFER,
        prefill_available=True,
        placement=pb.PLACEMENT_SPLIT,
        placement_why="both are busy",
        split_tokens=split_tokens,
        **how,  # type: ignore[arg-type]
    )
    submission.sampling.max_tokens = 50
    scene.on(SessionMessage(SESSION, pb.SessionRequest(submit=submission)))


def lease_of(scene: Scene) -> OpenLease:
    (command,) = scene.reserved(1)
    assert isinstance(command, OpenLease)
    return command


def test_the_rest_is_computed_once_the_first_part_is_here() -> None:
    scene = Scene()
    submit_split(scene, 50)
    grant = lease_of(scene).grant
    assert (grant.token_start, grant.token_stop, grant.resume_at) == (16, 48, 45)  # whole blocks
    (reserved,) = sent(scene.opened(grant.number))
    ticket = reserved.reserved.ticket
    assert (ticket.token_start, ticket.token_stop, ticket.first_part) == (16, 48, True)
    assert scene.filled(grant.number) == []
    assert scene.on(HandOverReceived(1, pb.HandOver(lease=grant.number))) == [CloseLease(grant.number)]
    closed = scene.closed(grant.number)
    assert names(closed) == ["Send admitted", "PrefillHere"]
    assert closed[1] == PrefillHere("1.1", (), received_tokens=48)
    scene.now_s += 2.0
    done = StepEvents(1, 0.1, started=(RequestStarted("1.1", 48, 0.5),), tokens=(token(1, 0),))
    (step,) = sent(scene.on(StepDone(done)))
    (first,) = step.step.tokens
    assert (first.prefill_s, first.queue_s) == (1.5, 0.5)


def test_waiting_for_a_local_prefill_is_no_part_of_it() -> None:
    scene = Scene()
    scene.prefilling_here(1)
    scene.now_s += 2.0
    done = StepEvents(1, 0.1, started=(RequestStarted("1.1", 0, 1.75),), tokens=(token(1, 0),))
    (step,) = sent(scene.on(StepDone(done)))
    (first,) = step.step.tokens
    assert (first.prefill_s, first.queue_s) == (0.25, 1.75)


def test_a_split_within_the_cached_tokens_leaves_nothing_to_send() -> None:
    scene = Scene()
    submit_split(scene, 16)
    assert names(scene.reserved(1)) == ["Send accepted", "PrefillHere"]


@pytest.mark.parametrize("split_tokens", [0, 3, 100, 104])
def test_an_impossible_split_is_an_ordinary_hand_over(split_tokens: int) -> None:
    scene = Scene()
    submit_split(scene, split_tokens)
    assert lease_of(scene).grant.token_stop == 100


def test_a_hand_over_that_does_not_fit_its_ticket_is_lost() -> None:
    scene = Scene()
    submit_split(scene, 48)
    lease = lease_of(scene).grant.number
    scene.opened(lease)
    scene.filled(lease)
    assert names(scene.hand_over(lease)) == ["Send hand_over_failed"]
    whole = scene.filling(2)
    scene.filled(whole)
    assert names(scene.on(HandOverReceived(1, pb.HandOver(lease=whole)))) == ["Send hand_over_failed"]


def test_another_prefill_node_may_compute_the_first_part() -> None:
    scene = Scene()
    submit_split(scene, 48)
    lease = lease_of(scene).grant.number
    scene.opened(lease)
    assert scene.renew(1, lease) == [CloseLease(lease)]
    assert names(scene.closed(lease)) == ["ExtendReserved"]
    assert lease_of(scene).grant.token_stop == 48


def test_an_idle_node_prefills_a_short_prompt_whatever_it_costs() -> None:
    slow = Streams(StepCosts(points=((1, 0.01), (2, 1.0))), rows=0, keys=0, step_tokens=1024)
    assert local_prefill_reason(None, 31, 0, streams=slow)
    assert not local_prefill_reason(None, 32, 0, streams=slow)
    assert not local_prefill_reason(0, 31, 0, streams=slow)


COSTS = StepCosts(points=((1, 0.005), (128, 0.0053), (1024, 0.03)))
STREAMS = Streams(COSTS, rows=32, keys=0, step_tokens=1024)


@pytest.mark.parametrize(
    ("tokens", "uncached", "here"),
    [(None, 100, True), (None, 300, False), (None, 2000, False), (0, 1, False), (50, 49, True), (50, 50, False)],
)
def test_a_prompt_that_its_streams_hardly_notice_is_prefilled_here(
    tokens: int | None, uncached: int, here: bool
) -> None:
    assert bool(local_prefill_reason(tokens, uncached, 0, streams=STREAMS)) is here
