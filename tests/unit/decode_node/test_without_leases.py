"""The machine on a prefill node: it decodes only requests whose prompt it computes itself."""

import itertools

import pytest

from baton.core.errors import Draining, InvalidRequest, Overloaded
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.rpc.error_detail import from_detail
from decode_node.commands import Reserve
from decode_node.events import EngineRefused, RoomFreed, SessionClosed
from tests.unit.decode_node.scene import SESSION, Scene, names, reservation, sent, token

POLICIES = [pb.LOCAL_POLICY_UNSPECIFIED, pb.LOCAL_POLICY_STRICT, pb.LOCAL_POLICY_PREFER, pb.LOCAL_POLICY_LOCAL]
PLACEMENTS = [pb.PLACEMENT_UNSPECIFIED, pb.PLACEMENT_REMOTE, pb.PLACEMENT_LOCAL, pb.PLACEMENT_SPLIT]


@pytest.fixture
def scene() -> Scene:
    return Scene(gives_leases=False)


@pytest.mark.parametrize("knows_role", [True, False])
@pytest.mark.parametrize("cached_tokens", [0, 96])
def test_every_request_is_computed_here_or_refused_and_none_gets_a_lease(
    scene: Scene, cached_tokens: int, knows_role: bool
) -> None:
    """A gateway that does not know the role yet tries another node; one that knows it has made a mistake."""
    kinds = itertools.product(POLICIES, PLACEMENTS, (True, False))
    taken = []
    for key, (policy, placement, available) in enumerate(kinds, start=1):
        wanted = {
            "policy": policy,
            "placement": placement,
            "prefill_available": available,
            "to_prefill_node": knows_role,
        }
        commands = scene.submit(key, **wanted)  # type: ignore[arg-type]
        if names(commands) == ["Send failed", "Send released"]:
            error = from_detail(sent(commands)[0].failed.error)
            assert isinstance(error, InvalidRequest if knows_role else Draining)
            assert (error.field, error.allowed) == ("placement", ("PLACEMENT_LOCAL",))
            assert "decode-0 is a prefill node" in str(error)
            continue
        assert names(commands) == ["Reserve"]
        assert names(scene.reserved(key, cached_tokens=cached_tokens)) == ["Send accepted", "PrefillHere"]
        taken.append((policy, placement, available))
    assert len(taken) == 8 + 2 * 5  # all of the policy local; local, or with no prefill node to leave it to
    assert (pb.LOCAL_POLICY_PREFER, pb.PLACEMENT_LOCAL, True) in taken
    assert (pb.LOCAL_POLICY_PREFER, pb.PLACEMENT_REMOTE, True) not in taken
    assert (pb.LOCAL_POLICY_STRICT, pb.PLACEMENT_LOCAL, False) not in taken


def test_a_request_that_waits_gets_room_that_a_prompt_has_left(scene: Scene) -> None:
    assert scene.on(RoomFreed()) == []
    scene.submit(1, policy=pb.LOCAL_POLICY_LOCAL, max_queue_s=5.0)
    scene.submit(2, policy=pb.LOCAL_POLICY_LOCAL, max_queue_s=5.0)
    assert scene.on(RoomFreed()) == [], "the engine has not answered yet"
    assert scene.on(EngineRefused(f"{SESSION}.1", Overloaded("no room"))) == []
    (again,) = scene.on(RoomFreed())
    assert isinstance(again, Reserve)
    assert again.request.request_id == f"{SESSION}.1"
    assert names(scene.reserved(1)) == ["Send accepted", "PrefillHere", "Reserve"]


def test_messages_about_a_lease_are_ignored(scene: Scene) -> None:
    scene.prefilling_here(1)
    assert scene.renew(1, 1) == scene.renew(1, 0) == scene.prefill_here(1, 1) == scene.hand_over(1) == []
    assert names(scene.step(token(1, 0))) == ["Send step"]


def test_tokens_of_other_requests_of_the_engine_are_ignored(scene: Scene) -> None:
    scene.prefilling_here(1)
    other = token(1, 0)._replace(request_id="1")
    assert scene.step(other) == []
    assert names(scene.step(other, token(1, 0))) == ["Send step"]


def test_the_end_of_a_session_ends_its_requests(scene: Scene) -> None:
    scene.prefilling_here(1)
    scene.submit(2, policy=pb.LOCAL_POLICY_LOCAL, max_queue_s=5.0)
    assert names(scene.on(SessionClosed(SESSION))) == ["Abort"]
    assert reservation(2).request_id == f"{SESSION}.2"
    assert names(scene.reserved(2)) == ["Abort"]
    scene.aborted(1)
    scene.aborted(2)
    assert not scene.machine.busy
