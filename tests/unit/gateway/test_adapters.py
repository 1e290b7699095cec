"""Which adapters a gateway serves, of which revision, and to which nodes it sends their requests."""

from dataclasses import replace

import pytest

from baton.core.errors import InvalidRequest, NoNode
from baton.core.types import AdapterRef, LocalPolicy
from baton.gateway.core.events import FleetChanged, Started
from baton.gateway.core.prompt_blocks import PromptBlocks
from baton.gateway.fleet.router import RoutedRequest
from baton.gateway.request.commands import Finish, SubmitToDecode
from baton.gateway.request.machine import RequestMachine
from baton.gateway.request.node_choice import NodeChoice
from baton.gateway.serving.validate import check_revision
from baton.protos.v1 import node_status_pb2
from baton.rpc.revisions import answer_revision
from tests.unit.gateway.fleets import DECODE, PREFILL, SmallFleet, decoding_node, request, rules
from tests.unit.gateway.served import Served, Words, only

OLD, NEW, OTHER = AdapterRef("sql", "1" * 32), AdapterRef("sql", "2" * 32), AdapterRef("chat", "3" * 32)


def give(fleet: SmallFleet, address: str, *adapters: AdapterRef) -> None:
    """The node's next status has these adapters."""
    nodes = fleet.decodes if address.startswith("d") else fleet.prefills
    status = node_status_pb2.NodeStatus()
    status.CopyFrom(nodes[address].status)
    del status.adapters[:]
    status.adapters.extend(node_status_pb2.Adapter(name=each.name, revision=each.revision) for each in adapters)
    fleet.status_received(DECODE if address.startswith("d") else PREFILL, address, status, 1.0)


def test_the_revision_of_a_whole_pair_serves_while_another_takes_its_place() -> None:
    fleet = SmallFleet(2, 2)
    assert fleet.adapters() == {}
    for address in ("p1", "p2", "d1", "d2"):
        give(fleet, address, OLD)
    assert fleet.adapters() == {"sql": OLD}
    give(fleet, "p1", NEW, OTHER)
    give(fleet, "p2", NEW)
    assert fleet.adapters()["chat"] == OTHER
    give(fleet, "d1", NEW)
    assert fleet.adapters()["sql"] == NEW
    give(fleet, "p1", OLD)
    give(fleet, "p2", OLD)
    assert fleet.adapters()["sql"] == OLD


@pytest.mark.parametrize("policy", list(LocalPolicy))
def test_all_nodes_of_a_request_have_its_adapter(policy: LocalPolicy) -> None:
    fleet = SmallFleet(2, 3, policy)
    give(fleet, "p2", OLD)
    give(fleet, "d3", OLD, OTHER)
    placement = fleet.place(RoutedRequest(num_tokens=64, policy=policy, adapter=OLD), 0.0)
    assert placement is not None
    assert placement.decode.address == "d3"
    assert placement.prefill is None or placement.prefill.address == "p2"
    assert (placement.prefill is None) == (policy is LocalPolicy.LOCAL)
    assert decoding_node(fleet, RoutedRequest(num_tokens=64, policy=policy, adapter=NEW)) is None


def test_a_request_without_a_pair_for_its_adapter_ends_with_the_nodes_that_have_it() -> None:
    fleet = SmallFleet(1, 1, LocalPolicy.STRICT)
    give(fleet, "d1", OLD)
    choice = NodeChoice(rules(LocalPolicy.STRICT), fleet, adapter=OLD)
    with pytest.raises(NoNode, match=f"the adapter sql of revision {OLD.revision} is on node-21, and all nodes"):
        choice.decode_node(64, begun=False, now_s=0.0)
    give(fleet, "p1", OLD)
    assert choice.decode_node(64, begun=False, now_s=0.0) is not None


def test_blocks_of_a_prompt_have_other_names_with_each_adapter_and_revision() -> None:
    prompt = list(range(32))
    numbers = {
        tuple(PromptBlocks(prompt, cache_salt="", adapter=adapter).numbers("model", 16).up_to(2))
        for adapter in (None, OLD, NEW, OTHER, AdapterRef("other", OLD.revision))
    }
    assert len(numbers) == 5
    assert len({number for each in numbers for number in each}) == 10


WEIGHTS = "0123456789ab"


def test_an_answer_goes_on_with_the_revision_of_the_adapter_that_began_it() -> None:
    begun = answer_revision(WEIGHTS, OLD)
    assert check_revision(begun, NEW) == (WEIGHTS, OLD)
    assert check_revision(answer_revision(WEIGHTS, None), None) == (WEIGHTS, None)
    assert check_revision("", NEW) == ("", NEW)


@pytest.mark.parametrize(
    ("revision", "adapter"), [(f"{WEIGHTS}+12", None), (f"{WEIGHTS}+", OLD), ("+12", OLD), (WEIGHTS, NEW)]
)
def test_revisions_that_are_not_of_the_named_model_are_refused(revision: str, adapter: AdapterRef | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_revision(revision, adapter)
    assert refused.value.field == "revision"


# ---- resumed requests


def resumed_with(adapter: AdapterRef, fleet: SmallFleet) -> Served:
    """A request whose client already has a token from this revision of the adapter."""
    served = Served(start=False)
    asked = replace(request(), revision=fleet.decodes["d1"].revision, output=(100,), adapter=adapter)
    served.machine = RequestMachine(asked, rules(), fleet, Words())
    served.machine.resume()
    return served


def fleet_with(*adapters: AdapterRef) -> SmallFleet:
    fleet = SmallFleet(1, 2)
    for address in ("p1", "d1", "d2"):
        give(fleet, address, *adapters)
    return fleet


def test_an_answer_goes_on_where_the_adapter_that_began_it_still_is() -> None:
    fleet = fleet_with(NEW)
    for address in ("p1", "d2"):
        give(fleet, address, OLD)
    served = resumed_with(OLD, fleet)
    submission = only(served.handle(Started()), SubmitToDecode)
    assert submission.address == "d2"
    assert submission.request.adapter.revision == OLD.revision


def test_an_answer_whose_adapter_was_replaced_ends_at_once() -> None:
    served = resumed_with(OLD, fleet_with(NEW))
    served.handle(Started())
    assert isinstance(served.error, NoNode)
    assert served.error.field == "revision"
    assert str(served.error.value).endswith(f"+{OLD.revision}")
    assert "weights + adapter sql, which no node has any more" in str(served.error)


def test_an_answer_waits_for_a_lost_node_with_its_adapter() -> None:
    fleet = fleet_with(NEW)
    for address in ("p1", "d2"):
        give(fleet, address, OLD)
    fleet.lose("d2")
    served = resumed_with(OLD, fleet)
    served.handle(Started())
    assert "waiting up to" in served.messages[-1].notice
    fleet.connect("d2", 1.0)
    give(fleet, "d2", NEW)
    give(fleet, "p1", NEW)
    only(served.handle(FleetChanged()), Finish)
    assert isinstance(served.error, NoNode)
