"""Requests whose tokens may be in stores outside of the cache: they are looked for before blocks are reserved."""

import pytest

from decode_node.commands import Prefetch, Reserve
from decode_node.events import SessionClosed
from decode_node.machine import _PREFETCHES_MAX
from tests.unit.decode_node.scene import SESSION, Scene, names


@pytest.fixture
def scene() -> Scene:
    return Scene(prefetches=True, waiting_max=2)


def test_blocks_are_reserved_after_the_tokens_were_looked_for(scene: Scene) -> None:
    (prefetch,) = scene.submit(1)
    assert isinstance(prefetch, Prefetch)
    (reserve,) = scene.prefetched(1)
    assert reserve == Reserve(prefetch.request)
    assert names(scene.reserved(1)) == ["OpenLease"]


def test_a_request_that_finds_its_tokens_sooner_goes_first(scene: Scene) -> None:
    scene.submit(1)
    scene.submit(2)
    (reserve,) = scene.prefetched(2)
    assert isinstance(reserve, Reserve)
    assert reserve.request.request_id == f"{SESSION}.2"


def test_a_request_that_was_cancelled_meanwhile_reserves_nothing(scene: Scene) -> None:
    scene.submit(1)
    assert names(scene.cancel(1)) == ["Abort"]
    assert scene.prefetched(1) == []
    assert names(scene.aborted(1)) == ["Send released"]
    assert scene.prefetched(1) == []
    assert not scene.machine.busy


def test_a_request_ends_with_its_session_while_its_tokens_are_looked_for(scene: Scene) -> None:
    scene.submit(1)
    assert names(scene.on(SessionClosed(SESSION))) == ["Abort"]
    scene.aborted(1)
    assert scene.prefetched(1) == []
    assert not scene.machine.busy


def test_a_request_that_must_not_wait_is_refused_when_others_go_first(scene: Scene) -> None:
    scene.submit(1, max_queue_s=10.0)
    scene.submit(2)
    scene.prefetched(1)
    assert names(scene.prefetched(2)) == ["Send failed", "Abort"]


def test_the_time_that_it_may_wait_includes_the_search(scene: Scene) -> None:
    scene.submit(1, max_queue_s=2.0)
    assert names(scene.after(2.0)) == ["Send failed", "Abort"]
    assert scene.prefetched(1) == []


def test_more_requests_than_may_search_at_a_time_are_queued_at_once() -> None:
    scene = Scene(prefetches=True, waiting_max=_PREFETCHES_MAX)
    for key in range(_PREFETCHES_MAX):
        assert names(scene.submit(key)) == ["Prefetch"]
    assert names(scene.submit(_PREFETCHES_MAX)) == ["Reserve"]
