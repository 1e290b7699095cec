"""The load of nodes over the last minutes: rates of tokens, gaps, and bounds."""

from baton.gateway.fleet.fleet_node import FleetNode
from baton.gateway.observe.node_history import HISTORY_STEP_S, POINTS_KEPT, LoadPoint, NodeHistory
from tests.unit.gateway.fleets import DECODE, SmallFleet, status

NODE = "d1"


def report(fleet: SmallFleet, tokens: int | None, *, running: int = 0, incarnation: int = 21) -> FleetNode:
    """The node after a status with this count of tokens; None: of a release without the count."""
    reported = status(DECODE, incarnation)
    reported.requests_running = running
    reported.blocks_total, reported.blocks_free = 200, 50
    if tokens is not None:
        reported.prompt_tokens_total, reported.generated_tokens_total = tokens // 4, tokens - tokens // 4
    fleet.status_received(DECODE, NODE, reported, 0.0)
    return next(node for node in fleet.nodes() if node.address == NODE)


def points_of(*counts: int | None) -> list[LoadPoint]:
    fleet, history = SmallFleet(0, 1), NodeHistory()
    for number, tokens in enumerate(counts):
        history.read([report(fleet, tokens)], number * HISTORY_STEP_S)
    return list(history.of(report(fleet, None)))


def test_a_point_has_the_rate_of_the_tokens_since_the_point_before() -> None:
    assert [point.tokens_per_s for point in points_of(100, 140, 140)] == [None, 10, 0]
    assert {point.kv_percent for point in points_of(0)} == {75}


def test_a_node_that_does_not_count_its_tokens_has_no_rate() -> None:
    assert [point.tokens_per_s for point in points_of(None, None)] == [None, None]


def test_a_count_that_begins_anew_gives_no_rate() -> None:
    """A node that switches its role or restarts."""
    assert [point.tokens_per_s for point in points_of(400, 8, 48)] == [None, None, 10]
    fleet, history = SmallFleet(0, 1), NodeHistory()
    history.read([report(fleet, 10)], 0.0)
    restarted = report(fleet, 500, incarnation=121)
    history.read([restarted], HISTORY_STEP_S)
    assert [point.tokens_per_s for point in history.of(restarted)] == [None, None]


def test_a_node_that_cannot_be_reached_leaves_a_gap() -> None:
    fleet, history = SmallFleet(0, 1), NodeHistory()
    history.read([report(fleet, 10, running=3)], 0.0)
    fleet.lose(NODE)
    history.read(fleet.nodes(), HISTORY_STEP_S)
    node = report(fleet, 90, running=1)
    history.read([node], 2 * HISTORY_STEP_S)
    assert [point.running for point in history.of(node)] == [3, None, 1]
    assert [point.tokens_per_s for point in history.of(node)] == [None, None, None]


def test_readings_within_a_step_add_no_point() -> None:
    fleet, history = SmallFleet(0, 1), NodeHistory()
    node = report(fleet, 0)
    for number in range(4 * 2):
        history.read([node], number * HISTORY_STEP_S / 2)
    assert len(list(history.of(node))) == 4


def test_a_bounded_number_of_points_is_kept_and_a_node_that_is_gone_is_forgotten() -> None:
    fleet, history = SmallFleet(0, 1), NodeHistory()
    node = report(fleet, 0)
    for number in range(3 * POINTS_KEPT):
        history.read([node], number * HISTORY_STEP_S)
    assert len(list(history.of(node))) == POINTS_KEPT
    history.read([], 3 * POINTS_KEPT * HISTORY_STEP_S)
    assert not list(history.of(node))
