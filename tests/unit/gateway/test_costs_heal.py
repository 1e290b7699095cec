"""A fleet whose nodes have measured wrong costs: simulated nodes, and the gateway's own choice."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from baton.core.costs import StepCosts, StepWork, chunk_pairs
from baton.core.types import LocalPolicy
from baton.gateway.fleet.fleet_node import FleetNode
from baton.gateway.fleet.placement import Placement, Route
from baton.gateway.fleet.router import RoutedRequest, pick_prefill
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert_node import costs_to_proto
from tests.unit.gateway.fleets import DECODE, PREFILL, SmallFleet, peer, status
from tests.unit.gateway.test_router import address as address_of

TRUE = StepCosts(((1, 0.008), (512, 0.1)), key_s=2e-8, pair_s=1e-9)
PROMPT, OUTPUT = 64, 40
REPORTS_S = 0.1


def times(factor: float) -> StepCosts:
    points = tuple((tokens, factor * seconds) for tokens, seconds in TRUE.points)
    return StepCosts(points, factor * TRUE.key_s, factor * TRUE.pair_s)


@dataclass
class _SimulatedNode:
    """A node that works off requests one after the other, and reports what it has measured."""

    address: str
    costs: StepCosts
    free_at_s: float = 0.0
    served: list[tuple[float, float]] = field(default_factory=list)  # from when to when, with the queue before

    def serve(self, seconds: float, now_s: float) -> float:
        start_s = max(self.free_at_s, now_s)
        self.free_at_s = start_s + seconds
        self.served.append((now_s, self.free_at_s))
        return self.free_at_s

    def queue_s(self, now_s: float) -> float:
        return max(0.0, self.free_at_s - now_s)


class _Cluster:
    """Two nodes of each role. A node's wrong costs are corrected by the work that it gets."""

    def __init__(self, factors: dict[str, float], *, profiled: bool = False) -> None:
        self.fleet = SmallFleet(2, 2, LocalPolicy.ELASTIC, also_decode=True)
        self.nodes = {address: _SimulatedNode(address, times(factor)) for address, factor in factors.items()}
        self._profiles = {address: node.costs for address, node in self.nodes.items()} if profiled else {}
        self._totals: Counter[str] = Counter()

    def report(self, now_s: float) -> None:
        for address, node in self.nodes.items():
            role = DECODE if address.startswith("d") else PREFILL
            number = int(address[1:])
            peers = [] if role == DECODE else [peer(21), peer(22)]
            report = status(role, (20 if role == DECODE else 10) + number, *peers)
            report.info.also_decodes = role == PREFILL
            report.blocks_free = 1000
            report.max_batch_requests, report.max_batch_tokens = 64, 512
            waiting = sum(ends_s > now_s for _, ends_s in node.served)
            report.requests_running = waiting
            report.decode_rows = min(1, waiting)
            report.context_tokens = 64 * report.decode_rows
            report.backlog_s = node.queue_s(now_s)
            report.requests_total = len(node.served)
            report.step_costs.CopyFrom(costs_to_proto(node.costs))
            if address in self._profiles:
                report.step_profile.CopyFrom(costs_to_proto(self._profiles[address]))
            self.fleet.status_received(role, address, report, now_s)

    def send(self, now_s: float) -> Placement:
        placement = self.fleet.place(RoutedRequest(PROMPT, LocalPolicy.ELASTIC), now_s)
        assert placement is not None
        decode = self.fleet.decoding_node(placement.decode)
        decode.note_sent(PROMPT)
        prompt_s = TRUE.seconds(StepWork(prompt_tokens=PROMPT, pairs=chunk_pairs(0, PROMPT)))
        output_s = OUTPUT * TRUE.seconds(StepWork(1, PROMPT))
        ready_s = now_s
        if placement.route is Route.REMOTE:
            assert placement.prefill is not None
            self.fleet.prefills[placement.prefill.address].note_sent(PROMPT)
            ready_s = self._work(placement.prefill.address, prompt_s, now_s)
            prompt_s = 0.0
        self._work(placement.decode.address, prompt_s + output_s, ready_s)
        return placement

    def _work(self, address: str, seconds: float, now_s: float) -> float:
        node = self.nodes[address]
        node.costs = TRUE  # it has measured some steps, and fits again
        return node.serve(seconds, now_s)

    def run(self, *, rate: float, seconds: float) -> list[Placement]:
        placements = []
        next_s, now_s = 0.0, 0.0
        while now_s < seconds:
            self.report(now_s)
            while next_s <= now_s:
                placements.append(self.send(now_s))
                next_s += 1 / rate
            now_s += REPORTS_S
        return placements


@pytest.mark.parametrize("wrong", [3.0, 10.0, 100.0])
def test_idle_nodes_with_costs_from_a_busy_machine_are_tried_again(wrong: float) -> None:
    cluster = _Cluster({"p1": 1.0, "p2": wrong, "d1": wrong, "d2": wrong})
    cluster.run(rate=7, seconds=60)
    for name, node in cluster.nodes.items():
        assert len(node.served) >= 30, name


@pytest.mark.parametrize("rate", [4, 8])
@pytest.mark.parametrize("wrong", [3.0, 14.0, 25.0])
def test_a_node_whose_first_steps_were_slow_gets_requests_within_seconds(wrong: float, rate: int) -> None:
    cluster = _Cluster({"p1": 1.0, "p2": wrong, "d1": 1.0, "d2": wrong})
    cluster.run(rate=rate, seconds=60 / rate)
    for name, node in cluster.nodes.items():
        assert len(node.served) >= 8, name
        assert node.served[0][0] < 4.0, name


def test_idle_nodes_with_profiles_from_a_busy_start_are_tried_again_and_then_chosen_by_what_they_measure() -> None:
    cluster = _Cluster({"p1": 1.0, "p2": 10.0, "d1": 10.0, "d2": 10.0}, profiled=True)
    cluster.run(rate=10, seconds=400)
    for name, node in cluster.nodes.items():
        last = sum(start_s > 300 for start_s, _ in node.served)
        assert last >= 30, name


def test_no_request_waits_for_a_node_next_to_an_equal_one_that_is_empty() -> None:
    cluster = _Cluster(dict.fromkeys(("p1", "p2", "d1", "d2"), 1.0))
    cluster.nodes["p1"].costs = times(0.8)  # measured a little less than the others
    fleet = cluster.fleet
    for waits_s in (0.02, 0.1, 0.95):
        cluster.nodes["p1"].free_at_s = 1.0 + waits_s
        cluster.report(1.0)
        placement = fleet.place(RoutedRequest(PROMPT, LocalPolicy.ELASTIC), 1.0)
        assert placement is not None
        assert "p1" not in (placement.decode.address, placement.prefill and placement.prefill.address)


def test_equal_idle_nodes_share_the_requests() -> None:
    cluster = _Cluster({"p1": 1.0, "p2": 1.2, "d1": 1.0, "d2": 1.3})
    cluster.run(rate=2, seconds=30)
    for role in ("p", "d"):
        first, second = (len(cluster.nodes[f"{role}{number}"].served) for number in (1, 2))
        assert abs(first - second) <= 2


def test_a_new_node_takes_its_turn_and_not_every_request_until_it_has_had_as_many() -> None:
    fleet = SmallFleet(0, 2, LocalPolicy.LOCAL)
    for _ in range(100):
        fleet.decodes["d1"].note_sent(1)
    fleet.connect("d1", 1.0)
    chosen = []
    for turn in range(6):
        for address in ("d1", "d2"):
            fleet.connect(address, 2.0 + turn)
        node = _decoding(fleet)
        node.note_sent(1)
        chosen.append(node.address)
    assert all(one != other for one, other in pairwise(chosen))


def test_a_prefix_that_saves_more_than_the_queue_costs_still_wins() -> None:
    fleet = SmallFleet(2, 1, LocalPolicy.STRICT)
    view = fleet.prefills["p1"].view()
    assert view.costs is None
    for number, backlog_s in ((1, 0.05), (2, 0.0)):
        report = status(PREFILL, 10 + number, peer(21))
        report.step_costs.CopyFrom(costs_to_proto(TRUE))
        report.backlog_s = backlog_s
        report.info.max_context_tokens = 100_000
        fleet.status_received(PREFILL, f"p{number}", report, 1.0)

    views = fleet.prefill_views(RoutedRequest(512, LocalPolicy.STRICT), 1.0)
    hit = [each.with_cached(448) if each.address == "p1" else each for each in views]
    decode = fleet.decodes["d1"].view()
    assert address_of(pick_prefill(hit, decode, RoutedRequest(512, LocalPolicy.STRICT))) == "p1"
    assert address_of(pick_prefill(views, decode, RoutedRequest(512, LocalPolicy.STRICT))) == "p2"


def _decoding(fleet: SmallFleet) -> FleetNode:
    placement = fleet.place(RoutedRequest(64, LocalPolicy.LOCAL), 0.0)
    assert placement is not None
    return fleet.decoding_node(placement.decode)


def test_a_restarted_node_is_as_new() -> None:
    fleet = SmallFleet(0, 1, LocalPolicy.LOCAL)
    report = status(DECODE, 21)
    report.step_costs.CopyFrom(costs_to_proto(times(9.0)))
    fleet.status_received(DECODE, "d1", report, 1.0)
    assert fleet.decodes["d1"].costs.reported == times(9.0)
    fleet.status_received(DECODE, "d1", status(DECODE, 22), 2.0)
    assert fleet.decodes["d1"].costs.reported is None
    assert fleet.decodes["d1"].role == node_status_pb2.ROLE_DECODE


def test_costs_of_a_node_with_another_model_change_no_others() -> None:
    fleet = SmallFleet(0, 2, LocalPolicy.LOCAL)
    for number, config_digest, factor in ((1, "digest", 1.0), (2, "another", 0.95)):
        report = status(DECODE, 20 + number)
        report.info.model.config_digest = config_digest
        report.step_costs.CopyFrom(costs_to_proto(times(factor)))
        fleet.status_received(DECODE, f"d{number}", report, 1.0)
    fleet.place(RoutedRequest(PROMPT, LocalPolicy.LOCAL), 1.0)
    assert fleet.decodes["d1"].view().costs == TRUE
    assert fleet.decodes["d2"].view().costs is None
