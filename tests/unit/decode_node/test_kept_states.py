"""A decode node that has the KV of a prompt's start, but not the recurrent state after it: a hand-over brings the
state, a prefill here has to begin earlier."""

from baton.protos.internal.v1 import decode_pb2 as pb
from decode_node.commands import OpenLease, PrefillHere, Reserve
from decode_node.events import SessionMessage
from tests.unit.decode_node.scene import SESSION, Scene, names, sent


def split(scene: Scene, split_tokens: int) -> Reserve:
    """A prompt of 100 tokens whose first part is to come."""
    submission = pb.SubmitRequest(
        key=1,
        prompt_token_ids=range(100),
        policy=pb.LOCAL_POLICY_PREFER,
        prefill_available=True,
        placement=pb.PLACEMENT_SPLIT,
        split_tokens=split_tokens,
    )
    submission.sampling.max_tokens = 50
    (command,) = scene.on(SessionMessage(SESSION, pb.SessionRequest(submit=submission)))
    assert isinstance(command, Reserve)
    return command


def test_a_hand_over_begins_after_the_cached_tokens() -> None:
    scene = Scene()
    scene.submit(1)
    (command,) = scene.reserved(1, cached_tokens=80, restart_at=16)
    assert isinstance(command, OpenLease)
    assert command.grant.token_start == 80
    (reserved,) = sent(scene.opened(command.grant.number))
    assert (reserved.reserved.ticket.token_start, reserved.reserved.cached_tokens) == (80, 80)


def test_a_prompt_is_prefilled_here_if_little_is_to_compute_after_its_last_kept_state() -> None:
    scene = Scene(local_prefill_tokens=32)
    scene.submit(1)
    assert names(scene.reserved(1, cached_tokens=96, restart_at=64)) == ["OpenLease"]
    scene.submit(2)
    accepted, here = scene.reserved(2, cached_tokens=96, restart_at=72)
    assert sent([accepted])[0].accepted.cached_tokens == 72
    assert here == PrefillHere("1.2", ())


def test_a_lost_hand_over_is_prefilled_from_the_last_kept_state_on() -> None:
    scene = Scene()
    scene.submit(1)
    (command,) = scene.reserved(1, cached_tokens=80, restart_at=16)
    assert isinstance(command, OpenLease)
    lease = command.grant.number
    scene.opened(lease)
    scene.prefill_here(1, lease)
    accepted, _ = scene.closed(lease)
    assert sent([accepted])[0].accepted.cached_tokens == 16


def test_the_state_after_a_first_part_comes_with_the_last_block_before_it() -> None:
    scene = Scene()
    assert split(scene, 50).arriving_tokens == 48
    (command,) = scene.reserved(1, cached_tokens=44, restart_at=16)
    assert isinstance(command, OpenLease)
    assert (command.grant.token_start, command.grant.token_stop) == (44, 48)
