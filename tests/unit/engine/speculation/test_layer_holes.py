"""Where drafts of the model's own layer do not pay for long, the layer no longer computes the tokens of decodes, and
drafts for new requests only."""

from dataclasses import dataclass

from baton.core.costs import StepCosts
from baton.engine.speculation.layer_drafting import RETRY_STEPS
from baton.engine.speculation.speculator import Speculator
from tests.unit.engine.speculation.request import COSTS, DecodingRequest, work_of

SATURATED = StepCosts(((1, 0.001), (1000, 1.0)))
TARGET = [*range(5000, 7000)]


def new_requests(*names: str) -> list[DecodingRequest]:
    return [DecodingRequest(name, [1, 2, 3], TARGET) for name in names]


@dataclass
class Decodes:
    """Steps of decodes on one node."""

    speculator: Speculator

    def step(
        self, requests: list[DecodingRequest], costs: StepCosts | None, *, right: int = 4, room: int = 64
    ) -> tuple[int, bool]:
        """One step: how many drafts it asks for, and whether the layer computes it.

        Args:
            right: how many of a request's drafts are accepted.
        """
        count = self.speculator.count_layer_drafts(requests, work_of(requests), costs, room=room)
        writes = count > 0 or self.speculator.writes_layer_kv(requests)
        for request in requests:
            self.speculator.begin(request, root=None, grammar=None)
            request.take(())
            at = len(request.tokens) - len(request.prompt)
            if count:
                self.speculator.take_layer_drafts(request, [*TARGET[at : at + right], *[7] * count][:count])
        self.speculator.choose(requests, work_of(requests), costs, room=room)
        return count, writes

    def saturate(self, requests: list[DecodingRequest], steps: int = RETRY_STEPS + 1) -> list[bool]:
        found = [self.step(requests, SATURATED) for _ in range(steps)]
        assert not any(count for count, _ in found)
        return [writes for _, writes in found]


def test_at_saturation_the_layer_computes_nothing_after_some_steps() -> None:
    writes = Decodes(Speculator()).saturate(new_requests("a", "b"), 2 * RETRY_STEPS)
    assert writes == [True] * (RETRY_STEPS - 1) + [False] * (RETRY_STEPS + 1)


def test_a_node_without_free_seats_is_saturated() -> None:
    decodes, requests = Decodes(Speculator()), new_requests("a", "b")
    found = [decodes.step(requests, COSTS, room=0) for _ in range(RETRY_STEPS + 1)]
    assert found[0] == (0, True)
    assert found[-1] == (0, False)


def test_unknown_costs_stop_nothing() -> None:
    decodes, requests = Decodes(Speculator()), new_requests("a")
    assert {decodes.step(requests, None) for _ in range(2 * RETRY_STEPS)} == {(0, True)}


def test_nothing_stops_where_drafts_are_always_taken() -> None:
    speculator, requests = Speculator(always=True), new_requests("a")
    for _ in range(2 * RETRY_STEPS):
        assert speculator.count_layer_drafts(requests, work_of(requests), SATURATED, room=0) == 0
        assert speculator.writes_layer_kv(requests)


def test_when_load_falls_new_requests_are_drafted_for_and_others_are_not() -> None:
    decodes, old, new = Decodes(Speculator()), new_requests("a", "b"), new_requests("c", "d", "e", "f")
    decodes.saturate(old)
    assert decodes.step(old, COSTS) == (0, False), "each has a hole, so nothing is worth computing"
    count, writes = decodes.step([*old, *new], COSTS)
    assert count > 0
    assert writes
    chosen = decodes.speculator.choose([*old, *new], work_of([*old, *new]), COSTS, room=64)
    assert chosen.keys() == {"c", "d", "e", "f"}


def test_the_kv_of_new_requests_is_complete_also_where_too_few_of_them_decode() -> None:
    decodes, old, new = Decodes(Speculator()), new_requests(*map(str, range(30))), new_requests("new")
    decodes.saturate(old)
    assert decodes.step([*old, *new], COSTS) == (0, True), "one of 31 requests does not pay for the passes of all"
    assert decodes.step(new, COSTS)[0] > 0


def test_a_request_with_a_hole_is_still_drafted_for_from_its_text() -> None:
    decodes = Decodes(Speculator())
    (request,) = new_requests("a")
    request.target = TARGET[:30] * 20
    decodes.saturate([request], RETRY_STEPS + 40)
    decodes.speculator.take_layer_drafts(request, (8, 8, 8, 8))
    chosen = decodes.speculator.choose([request], work_of([request]), COSTS, room=64)
    at = len(request.tokens) - len(request.prompt)
    assert chosen["a"][:4] == tuple(request.target[at : at + 4])


def test_a_long_match_that_needs_no_drafts_of_the_layer_leaves_no_hole() -> None:
    decodes = Decodes(Speculator())
    (request,) = new_requests("a")
    request.target = [*TARGET[:30] * 12, *TARGET[100:]]
    found = [decodes.step([request], COSTS) for _ in range(12 * 30 - 1)]
    assert sum(count == 0 for count, _ in found) > 4 * RETRY_STEPS
    assert all(writes for _, writes in found)


def test_a_request_that_ends_leaves_no_mark() -> None:
    decodes = Decodes(Speculator())
    (first,) = new_requests("a")
    decodes.saturate([first])
    decodes.speculator.end(first)
    assert decodes.step(new_requests("a"), COSTS)[0] > 0


def rounds_of(decodes: Decodes, *, rounds: int, right: int) -> list[tuple[int, bool]]:
    """Steps of 8 requests after 8 others, each for a little longer than it takes until a draft token is tried."""
    found = []
    for _ in range(rounds):
        requests = new_requests(*map(str, range(8)))
        found += [decodes.step(requests, COSTS, right=right) for _ in range(RETRY_STEPS + 2)]
        for request in requests:
            decodes.speculator.end(request)
    return found


def test_rejected_drafts_stop_the_layer_and_new_requests_are_tried_now_and_then() -> None:
    decodes = Decodes(Speculator())
    rounds_of(decodes, rounds=4, right=0)  # until the drafts are known to be wrong
    later = rounds_of(decodes, rounds=6, right=0)
    assert 0 < sum(count > 0 for count, _ in later) <= 6
    assert sum(writes for _, writes in later) <= 6, "only with a draft token"


def test_drafts_that_become_right_are_found_out() -> None:
    decodes = Decodes(Speculator())
    rounds_of(decodes, rounds=4, right=0)
    counts = [count for count, _ in rounds_of(decodes, rounds=16, right=4)]
    assert not all(counts[:RETRY_STEPS])
    assert all(counts[-RETRY_STEPS:])
