"""The gateway shows which revisions serve at once; and requests whose client already has a part of the answer."""

from dataclasses import replace

import pytest

from baton.core.errors import NoNode
from baton.core.version import __version__
from baton.gateway.core.events import FleetChanged, Started, TimePassed
from baton.gateway.core.shared_counters import SharedCounters
from baton.gateway.fleet import copies
from baton.gateway.fleet.fleet_node import FleetNode
from baton.gateway.fleet.revisions import serving_revisions, serving_versions
from baton.gateway.observe.metrics import GatewayMetrics
from baton.gateway.request.commands import Finish, SubmitToDecode
from baton.gateway.request.machine import RequestMachine
from baton.metrics.exposition import by_series
from baton.protos.v1 import node_status_pb2
from tests.unit.gateway.fleets import DECODE, PREFILL, SmallFleet, request, rules
from tests.unit.gateway.served import LENGTH, Served, Words, accepted, only, token


def change(node: FleetNode, **fields: object) -> None:
    """The node's next status says so."""
    for path, value in fields.items():
        *outer, name = path.split("__")
        message = node.status
        for each in outer:
            message = getattr(message, each)
        setattr(message, name, value)
    node.take_status(node.status, node.detail, 0.0)


def mixed() -> SmallFleet:
    fleet = SmallFleet(1, 2)
    change(fleet.prefills["p1"], info__package_version="0.1", info__model__revision_name="v1")
    change(fleet.decodes["d1"], info__package_version="0.1")
    change(fleet.decodes["d2"], info__package_version="0.2", info__model__weights_digest="others")
    return fleet


def test_a_revision_has_the_name_that_one_of_its_nodes_has_for_it() -> None:
    fleet = mixed()
    revisions = {each.revision: each.name for each in serving_revisions(fleet.nodes())}
    assert revisions == {fleet.decodes["d1"].revision: "v1", fleet.decodes["d2"].revision: ""}
    assert serving_versions(fleet.nodes()) == {__version__, "0.1", "0.2"}


def test_a_node_that_drains_serves_and_one_that_is_lost_or_foreign_does_not() -> None:
    fleet = mixed()
    change(fleet.decodes["d2"], draining=True)
    assert len(serving_revisions(fleet.nodes())) == 2
    fleet.lose("d2")
    assert len(serving_revisions(fleet.nodes())) == 1
    fleet.connect("d2", 1.0)
    fleet.decodes["d2"].detail = "another model"
    assert serving_versions(fleet.nodes()) == {__version__, "0.1"}


def report_content(fleet: SmallFleet, node: str, digest: str, *, weights: str = "weights", now_s: float = 1.0) -> str:
    """The node's status says that its weights have this content digest; returns why it is not used."""
    role, nodes = (DECODE, fleet.decodes) if node.startswith("d") else (PREFILL, fleet.prefills)
    reported = node_status_pb2.NodeStatus()
    reported.CopyFrom(nodes[node].status)
    reported.info.model.content_digest, reported.info.model.weights_digest = digest, weights
    fleet.status_received(role, node, reported, now_s)
    return nodes[node].detail


def test_a_copy_that_differs_from_most_others_in_some_bytes_serves_nothing() -> None:
    fleet = SmallFleet(1, 2)
    assert report_content(fleet, "p1", "aa") == ""
    assert report_content(fleet, "d1", "aa") == ""
    refused = report_content(fleet, "d2", "0f")
    assert "differ in some bytes from those of node-11, node-21 (content digest 0f, theirs aa)" in refused
    assert not fleet.decodes["d2"].serves
    assert report_content(fleet, "d2", "aa") == ""


@pytest.mark.parametrize("digests", [{"p1": "bb", "d1": "aa"}, {"p1": "aa", "d1": "bb"}, {"d1": "aa", "d2": "bb"}])
def test_of_two_copies_all_gateways_choose_the_same_and_one_that_can_serve(digests: dict[str, str]) -> None:
    for order in (list(digests), list(digests)[::-1]):
        fleet = SmallFleet(1, 2)
        for node in (*order, *order):  # each reports again once both are known
            report_content(fleet, node, digests[node])
        nodes = {**fleet.prefills, **fleet.decodes}
        assert [node for node in digests if nodes[node].serves] == ["d1"]


def test_other_weights_and_older_nodes_are_no_damaged_copies() -> None:
    fleet = SmallFleet(1, 2)
    report_content(fleet, "p1", "bb")
    assert report_content(fleet, "d1", "aa", weights="others") == ""
    assert report_content(fleet, "d2", "") == ""
    assert fleet.prefills["p1"].serves


def test_nodes_that_are_gone_for_good_refuse_nobody() -> None:
    fleet = SmallFleet(1, 2)
    for node in ("p1", "d1"):
        report_content(fleet, node, "aa")
        fleet.lose(node)
    assert "those of node-11, node-21" in report_content(fleet, "d2", "0f", now_s=300.0)  # they may come back
    assert report_content(fleet, "d2", "0f", now_s=700.0) == ""
    assert report_content(fleet, "p1", "aa", now_s=701.0) != ""


def test_nodes_that_are_no_longer_listed_refuse_nobody() -> None:
    fleet = SmallFleet(1, 2)
    report_content(fleet, "p1", "aa")
    report_content(fleet, "d1", "aa")
    assert report_content(fleet, "d2", "0f") != ""
    fleet.remove(PREFILL, "p1", 0.0)
    fleet.remove(DECODE, "d1", 0.0)
    assert report_content(fleet, "d2", "0f") == ""


def test_a_status_that_changes_no_copy_costs_the_same_in_a_fleet_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = SmallFleet(100, 100)
    nodes = (*fleet.prefills, *fleet.decodes)
    for node in nodes:
        report_content(fleet, node, "aa")
    monkeypatch.setattr(copies, "Counter", None)  # nothing is counted again
    for node in nodes:
        assert report_content(fleet, node, "aa") == ""


def test_metrics_name_what_each_node_runs_and_count_what_is_mixed() -> None:
    fleet = mixed()
    metrics = GatewayMetrics(SharedCounters(), "m", fleet, lambda: True)
    shown = by_series(metrics.figures())
    assert shown["baton_serving_versions", ()] == 3
    assert shown["baton_serving_revisions", ()] == 2
    ours, others = fleet.decodes["d1"].revision, fleet.decodes["d2"].revision
    assert {labels for name, labels in shown if name == "baton_node_info"} == {
        ("node-11", "prefill", "0.1", ours, "v1"),
        ("node-21", "decode", "0.1", ours, ""),
        ("node-22", "decode", "0.2", others, ""),
    }


# ---- resumed requests


class Resumed(Served):
    """A request whose client has a part of the answer, from this revision, perhaps with tokens to continue from."""

    def __init__(self, fleet: SmallFleet, revision: str, *given: int) -> None:
        super().__init__(start=False)
        self.fleet = fleet
        asked = replace(request(), revision=revision, output=given)
        self.machine = RequestMachine(asked, rules(), fleet, Words())
        if given:
            self.machine.resume()


@pytest.mark.parametrize("given", [(), (100,)])
@pytest.mark.parametrize("address", ["d1", "d2"])
def test_an_answer_goes_on_with_the_weights_that_began_it(address: str, given: tuple[int, ...]) -> None:
    fleet = mixed()
    node = fleet.decodes[address]
    resumed = Resumed(fleet, node.revision, *given)
    assert only(resumed.handle(Started()), SubmitToDecode).address == address
    resumed.decode(accepted(), token(len(given)))
    first = next(message for message in resumed.messages if message.tokens)
    assert first.revision == node.revision


@pytest.mark.parametrize("given", [(), (100,)])
def test_an_answer_whose_weights_nobody_has_ends_at_once(given: tuple[int, ...]) -> None:
    resumed = Resumed(mixed(), "0123456789ab", *given)
    resumed.handle(Started())
    assert isinstance(resumed.error, NoNode)
    assert (resumed.error.field, resumed.error.value) == ("revision", "0123456789ab")


@pytest.mark.parametrize("given", [(), (100,)])
def test_an_answer_waits_for_a_lost_node_with_its_weights(given: tuple[int, ...]) -> None:
    fleet = mixed()
    revision = fleet.decodes["d2"].revision
    fleet.lose("d2")
    resumed = Resumed(fleet, revision, *given)
    resumed.handle(Started())
    assert "the client's gateway was lost; waiting up to" in resumed.messages[-1].notice
    fleet.connect("d2", 1.0)
    change(fleet.decodes["d2"], info__model__weights_digest="others")
    assert only(resumed.handle(FleetChanged()), SubmitToDecode).address == "d2"


def test_an_answer_ends_when_the_node_comes_back_with_other_weights() -> None:
    fleet = mixed()
    revision = fleet.decodes["d2"].revision
    fleet.lose("d2")
    resumed = Resumed(fleet, revision, 100)
    resumed.handle(Started())
    fleet.connect("d2", 1.0, restarts=1)
    only(resumed.handle(FleetChanged()), Finish)
    assert isinstance(resumed.error, NoNode)


def test_an_answer_whose_weights_do_not_return_ends() -> None:
    fleet = mixed()
    revision = fleet.decodes["d2"].revision
    fleet.lose("d2")
    resumed = Resumed(fleet, revision, 100)
    resumed.handle(Started())
    resumed.handle(TimePassed(), after_s=20.0)
    assert isinstance(resumed.error, NoNode)


def test_a_receipt_has_the_revision_that_answered_and_the_nodes_versions() -> None:
    served = Served(decodes=1, start=False)
    change(served.fleet.decodes["d1"], info__package_version="0.2", info__model__revision_name="v7")
    served.handle(Started())
    served.decode(accepted(), *(token(index) for index in range(3)), token(3, LENGTH))
    receipt = served.receipt
    assert (receipt.revision, receipt.revision_name) == (served.fleet.decodes["d1"].revision, "v7")
    assert (receipt.prefill_version, receipt.decode_version) == ("", "0.2")
    assert [bool(message.revision) for message in served.messages] == [True, False]
