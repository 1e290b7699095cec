"""The fleet knows what its nodes' prefix caches have, and forgets what may be wrong."""

from dataclasses import replace

import pytest

from baton.core.costs import StepCosts
from baton.core.kv_entries import KeptPrefix, NodeRanks
from baton.core.pull_costs import PullCosts
from baton.core.types import LocalPolicy
from baton.gateway.core.prompt_blocks import PromptBlocks
from baton.gateway.fleet.node_report import kept_kind
from baton.gateway.fleet.placement import Route
from baton.gateway.fleet.router import RoutedRequest
from baton.protos.internal.v1 import node_pb2
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert_node import costs_to_proto
from tests.unit.gateway.fleets import DECODE, PREFILL, SmallFleet, decoding_node

PROMPT = list(range(100))
BLOCKS = PromptBlocks(PROMPT, cache_salt="").numbers("", 16).up_to(6)


def wanted(salt: str = "", **changes: object) -> RoutedRequest:
    prompt = PromptBlocks(PROMPT, cache_salt=salt)
    return replace(RoutedRequest(len(PROMPT), LocalPolicy.PREFER, prompt=prompt), **changes)  # type: ignore[arg-type]


def changed(fleet: SmallFleet, address: str, sequence: int, **fields: object) -> bool:
    """The node's cache stream brings this batch."""
    role = DECODE if address.startswith("d") else PREFILL
    incarnation = fleet.node(role, address).incarnation
    batch = node_pb2.WatchCacheResponse(sequence=sequence, incarnation=incarnation, **fields)  # type: ignore[arg-type]
    return fleet.cache_changed(role, address, batch)


def cached(fleet: SmallFleet, request: RoutedRequest | None = None) -> dict[str, int]:
    return {view.address: view.cached_tokens for view in fleet.prefill_views(request or wanted(), 0.0)}


def test_a_prompt_goes_to_the_prefill_node_that_has_most_of_it() -> None:
    fleet = SmallFleet(3, 1)
    assert changed(fleet, "p2", 1, snapshot=True, stored=BLOCKS[:2])
    assert changed(fleet, "p3", 1, snapshot=True, stored=BLOCKS)
    assert cached(fleet) == {"p1": 0, "p2": 32, "p3": 96}
    picked = fleet.pick_prefill(fleet.decodes["d1"], wanted(), 0.0)
    assert picked is fleet.prefills["p3"]
    assert picked.cached_tokens == 96
    assert changed(fleet, "p3", 2, removed=BLOCKS[1:])
    assert fleet.pick_prefill(fleet.decodes["d1"], wanted(), 0.0) is fleet.prefills["p2"]


def test_the_last_token_is_computed_in_any_case() -> None:
    fleet = SmallFleet(1, 1)
    assert changed(fleet, "p1", 1, snapshot=True, stored=BLOCKS)
    assert cached(fleet, wanted(num_tokens=96)) == {"p1": 80}


def test_another_salt_and_another_model_have_nothing() -> None:
    fleet = SmallFleet(2, 1)
    for address in ("p1", "p2"):
        assert changed(fleet, address, 1, snapshot=True, stored=BLOCKS)
    assert cached(fleet, wanted(salt="mine")) == {"p1": 0, "p2": 0}
    fleet.prefills["p2"].status.info.cache_identity = "another"
    assert cached(fleet) == {"p1": 96, "p2": 0}


def test_nodes_with_blocks_of_another_size_are_compared_by_tokens() -> None:
    fleet = SmallFleet(2, 1)
    fleet.prefills["p2"].status.info.cache_shape.block_size = 32
    large = PromptBlocks(PROMPT, cache_salt="").numbers("", 32).up_to(3)
    assert changed(fleet, "p1", 1, snapshot=True, stored=BLOCKS[:5])
    assert changed(fleet, "p2", 1, snapshot=True, stored=large)
    assert cached(fleet) == {"p1": 80, "p2": 96}


def test_a_gap_forgets_the_node_until_its_next_snapshot() -> None:
    fleet = SmallFleet(1, 1)
    assert changed(fleet, "p1", 4, snapshot=True, stored=BLOCKS)
    assert not changed(fleet, "p1", 6, removed=BLOCKS[3:])
    assert cached(fleet) == {"p1": 0}
    assert not changed(fleet, "p1", 7, stored=BLOCKS)
    assert changed(fleet, "p1", 7, snapshot=True, more=True, stored=BLOCKS[:1])
    assert changed(fleet, "p1", 7, stored=BLOCKS[1:2])
    assert changed(fleet, "p1", 8, stored=BLOCKS[2:3])
    assert cached(fleet) == {"p1": 48}


def test_a_snapshot_replaces_what_was_known() -> None:
    fleet = SmallFleet(1, 1)
    assert changed(fleet, "p1", 1, snapshot=True, stored=BLOCKS)
    assert changed(fleet, "p1", 9, snapshot=True, stored=BLOCKS[:1])
    assert cached(fleet) == {"p1": 16}


def test_a_lost_or_restarted_node_is_forgotten() -> None:
    for end in ("lost", "restarted"):
        fleet = SmallFleet(1, 1)
        assert changed(fleet, "p1", 1, snapshot=True, stored=BLOCKS)
        if end == "lost":
            fleet.lose("p1")
        fleet.connect("p1", 1.0, restarts=end == "restarted")
        assert cached(fleet) == {"p1": 0}


def test_changes_of_an_earlier_incarnation_are_not_taken() -> None:
    fleet = SmallFleet(1, 1)
    old = node_pb2.WatchCacheResponse(sequence=1, incarnation=11, snapshot=True, stored=BLOCKS)
    fleet.connect("p1", 1.0, restarts=1)
    assert not fleet.cache_changed(PREFILL, "p1", old)
    assert cached(fleet) == {"p1": 0}


def test_a_session_stays_on_its_nodes() -> None:
    fleet = SmallFleet(3, 3)
    request = wanted(prompt=None, session_id="s")
    decode = decoding_node(fleet, request)
    assert decode is not None
    prefill = fleet.pick_prefill(decode, request, 0.0)
    assert prefill is not None
    other = wanted(prompt=None)
    for node in (decode, prefill):
        node.note_sent(100)  # other nodes have had fewer requests by now
    for address in list(fleet.prefills):
        fleet.connect(address, 1.0)
    for address in list(fleet.decodes):
        fleet.connect(address, 1.0)
    assert decoding_node(fleet, other) is not decode
    assert fleet.pick_prefill(decode, other, 0.0) is not prefill
    assert decoding_node(fleet, request) is decode
    assert fleet.pick_prefill(decode, request, 0.0) is prefill
    fleet.lose(prefill.address)
    assert fleet.pick_prefill(decode, request, 0.0) not in (prefill, None)


LONG = list(range(400))


def long_prompt() -> RoutedRequest:
    return RoutedRequest(len(LONG), LocalPolicy.PREFER, prompt=PromptBlocks(LONG, cache_salt=""))


def long_blocks(count: int) -> list[int]:
    return PromptBlocks(LONG, cache_salt="").numbers("", 16).up_to(count)[:count]


def keeping(prefills: int, decodes: int) -> SmallFleet:
    """A fleet whose nodes keep KV outside of their caches."""
    fleet = SmallFleet(prefills, decodes)
    for node in fleet.nodes():
        report = node_status_pb2.NodeStatus()
        report.CopyFrom(node.status)
        report.stores.add(name="host")
        fleet.status_received(node.role, node.address, report, 1.0)
    return fleet


def test_a_node_that_lacks_most_of_a_prompt_is_told_who_has_it() -> None:
    fleet = keeping(2, 2)
    assert changed(fleet, "d1", 1, snapshot=True, stored=long_blocks(25))
    assert changed(fleet, "p2", 1, snapshot=True, stored=long_blocks(20))
    # The last token is computed in any case.
    assert fleet.kept_elsewhere(fleet.prefills["p1"], long_prompt()) == KeptPrefix("d1", 21, 384)
    assert fleet.kept_elsewhere(fleet.decodes["d2"], long_prompt()) == KeptPrefix("d1", 21, 384)
    # Not far behind, the one with most itself, and another salt.
    assert fleet.kept_elsewhere(fleet.prefills["p2"], long_prompt()) is None
    assert fleet.kept_elsewhere(fleet.decodes["d1"], long_prompt()) is None
    other = replace(long_prompt(), prompt=PromptBlocks(LONG, cache_salt="mine"))
    assert fleet.kept_elsewhere(fleet.prefills["p1"], other) is None


def test_nobody_is_told_of_a_node_that_keeps_nothing_is_gone_or_has_another_kind_of_kv() -> None:
    fleet = keeping(1, 1)
    assert changed(fleet, "d1", 1, snapshot=True, stored=long_blocks(25))
    decode, reader = fleet.decodes["d1"], fleet.prefills["p1"]
    assert fleet.kept_elsewhere(reader, long_prompt()) is not None
    report = node_status_pb2.NodeStatus()
    report.CopyFrom(decode.status)
    report.info.batch_invariant = True
    drafting = node_status_pb2.NodeStatus()
    drafting.CopyFrom(decode.status)
    drafting.info.cache_spec.draft.num_layers = 1
    kept = decode.kept_kind
    for other in (report, drafting):
        decode.kept_kind = kept_kind(other)
        assert fleet.kept_elsewhere(reader, long_prompt()) is None
    decode.kept_kind = kept
    report.CopyFrom(decode.status)
    report.draining = True
    fleet.status_received(DECODE, "d1", report, 2.0)
    assert fleet.kept_elsewhere(reader, long_prompt()) is not None  # what drains still sends
    fleet.lose("d1")
    assert fleet.kept_elsewhere(reader, long_prompt()) is None
    bare = SmallFleet(1, 1)
    assert changed(bare, "d1", 1, snapshot=True, stored=long_blocks(25))
    assert bare.kept_elsewhere(bare.prefills["p1"], long_prompt()) is None


def test_a_node_of_other_ranks_is_told_with_its_ranks_but_not_in_batch_invariant_mode() -> None:
    fleet = keeping(1, 1)
    assert changed(fleet, "d1", 1, snapshot=True, stored=long_blocks(25))
    decode, reader = fleet.decodes["d1"], fleet.prefills["p1"]
    report = node_status_pb2.NodeStatus()
    report.CopyFrom(decode.status)
    report.info.tensor_parallel_size, report.info.attention_data_parallel = 2, True
    fleet.status_received(DECODE, "d1", report, 2.0)
    kept = fleet.kept_elsewhere(reader, long_prompt())
    assert kept is not None
    assert kept.ranks == NodeRanks(2, own_requests=True)
    report.info.batch_invariant = True
    alike = node_status_pb2.NodeStatus()
    alike.CopyFrom(report)
    alike.info.tensor_parallel_size = 4
    assert kept_kind(report) != kept_kind(alike)
    alike.CopyFrom(report)
    assert kept_kind(report) == kept_kind(alike)
    alike.info.expert_parallel = True
    assert kept_kind(report) != kept_kind(alike)


# ---- blocks that a node must load first

# A token takes 1 ms to compute, so that the whole prompt takes 0.1 s.
COSTS = StepCosts(points=((1, 0.001), (1000, 1.0)), key_s=0.0, pair_s=0.0, decode_row_s=0.0)


def measured(fleet: SmallFleet, address: str, *, load_token_s: float | None) -> None:
    """The node reports step costs, and how fast it loads; None: it has loaded nothing yet."""
    status = node_status_pb2.NodeStatus()
    status.CopyFrom(fleet.prefills[address].status)
    status.step_costs.CopyFrom(costs_to_proto(COSTS))
    status.info.cache_spec.CopyFrom(
        node_status_pb2.CacheSpec(
            kind=node_status_pb2.KV_KIND_GQA, num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16"
        )
    )
    if load_token_s is not None:
        status.kv_loaded_tokens_total, status.kv_load_s_total = 10_000, 10_000 * load_token_s
    fleet.status_received(PREFILL, address, status, 0.0)


def picked(fleet: SmallFleet) -> str:
    node = fleet.pick_prefill(fleet.decodes["d1"], wanted(), 0.0)
    assert node is not None
    return node.address


def test_a_load_costs_what_the_node_has_measured() -> None:
    for load_token_s, best in ((1e-5, "p1"), (0.1, "p2")):
        fleet = SmallFleet(2, 1)
        measured(fleet, "p1", load_token_s=load_token_s)
        measured(fleet, "p2", load_token_s=load_token_s)
        assert changed(fleet, "p1", 1, snapshot=True, stored=BLOCKS, outside=BLOCKS)
        assert picked(fleet) == best


@pytest.mark.parametrize(("read_token_s", "best"), [(1e-5, "p1"), (0.1, "p2")])
def test_a_block_in_files_costs_its_read_too(read_token_s: float, best: str) -> None:
    fleet = SmallFleet(2, 1)
    for address in ("p1", "p2"):
        measured(fleet, address, load_token_s=1e-5)
        status = node_status_pb2.NodeStatus()
        status.CopyFrom(fleet.prefills[address].status)
        status.stores.add(name="file", reads_total=100, read_s_total=6400 * read_token_s)
        fleet.status_received(PREFILL, address, status, 0.0)
    assert changed(fleet, "p1", 1, snapshot=True, stored=BLOCKS, outside=BLOCKS, below=BLOCKS[2:])
    assert picked(fleet) == best
    (view,) = (view for view in fleet.prefill_views(wanted(), 0.0) if view.address == "p1")
    assert view.below_tokens == view.outside_tokens - 2 * view.block_size
    assert view.load_s == pytest.approx(view.outside_tokens * 1e-5 + view.below_tokens * read_token_s)
    # Once they are in host memory, a load alone.
    assert changed(fleet, "p1", 2, stored=BLOCKS, outside=BLOCKS)
    assert picked(fleet) == "p1"


def test_a_block_in_the_cache_costs_nothing() -> None:
    fleet = SmallFleet(2, 1)
    for address in ("p1", "p2"):
        measured(fleet, address, load_token_s=0.0005)
    assert changed(fleet, "p1", 1, snapshot=True, stored=BLOCKS, outside=BLOCKS)
    assert changed(fleet, "p2", 1, snapshot=True, stored=BLOCKS)
    assert picked(fleet) == "p2"
    assert changed(fleet, "p2", 2, stored=BLOCKS[:1], outside=BLOCKS[:1])
    views = {view.address: view for view in fleet.prefill_views(wanted(), 0.0)}
    assert views["p2"].outside_tokens == 96, "a load takes all that follows the first block"
    assert changed(fleet, "p2", 3, stored=BLOCKS[:1])
    assert fleet.prefill_views(wanted(), 0.0)[1].outside_tokens == 0


def test_a_node_that_has_loaded_nothing_counts_as_slower_than_a_link_to_host_memory() -> None:
    fleet = SmallFleet(1, 1)
    measured(fleet, "p1", load_token_s=None)
    assert changed(fleet, "p1", 1, snapshot=True, stored=BLOCKS, outside=BLOCKS)
    (view,) = fleet.prefill_views(wanted(), 0.0)
    assert view.load_s == pytest.approx(96 * view.kv_bytes_per_token / 5e9)
    assert view.kv_bytes_per_token == 131072


def test_a_node_that_reports_nonsense_about_its_loads_counts_as_one_that_has_not_measured() -> None:
    for nonsense in (float("nan"), float("inf"), -1.0, 0.0):
        fleet = SmallFleet(1, 1)
        measured(fleet, "p1", load_token_s=nonsense)
        assert changed(fleet, "p1", 1, snapshot=True, stored=BLOCKS, outside=[*BLOCKS, 1, 2, 3])
        assert 0 < fleet.prefill_views(wanted(), 0.0)[0].load_s < 1.0


def test_a_load_runs_while_a_queue_is_computed() -> None:
    fleet = SmallFleet(1, 1)
    measured(fleet, "p1", load_token_s=0.001)
    assert changed(fleet, "p1", 1, snapshot=True, stored=BLOCKS, outside=BLOCKS)
    (view,) = fleet.prefill_views(wanted(), 0.0)
    assert view.wait_s == view.load_s == pytest.approx(0.096)
    assert view.with_queue(1.0).wait_s == 1.0


# ---- blocks that another node has

PULLS = PullCosts(fixed_s=0.004, byte_s=1e-9)


def pulling_fleet(costs: PullCosts | None, *, also_decode: bool = False) -> SmallFleet:
    """Of prefill nodes that keep KV, p1 has most of the long prompt, and a queue of 0.3 s. The prompt takes 0.4 s."""
    fleet = SmallFleet(2, 1, LocalPolicy.ELASTIC if also_decode else LocalPolicy.PREFER, also_decode=also_decode)
    for address in ("p1", "p2"):
        measured(fleet, address, load_token_s=1e-5)
        report = node_status_pb2.NodeStatus()
        report.CopyFrom(fleet.prefills[address].status)
        report.stores.add(name="host")
        report.backlog_s = 0.3 if address == "p1" else 0.0
        if costs is not None:
            report.kv_pull_fixed_s, report.kv_pull_byte_s = costs.fixed_s, costs.byte_s
        fleet.status_received(PREFILL, address, report, 0.0)
    assert changed(fleet, "p1", 1, snapshot=True, stored=long_blocks(25))
    return fleet


def long_picked(fleet: SmallFleet) -> str:
    node = fleet.pick_prefill(fleet.decodes["d1"], long_prompt(), 0.0)
    assert node is not None
    return node.address


def test_a_node_that_can_pull_a_prompt_counts_as_one_that_has_it_after_the_pull() -> None:
    fleet = pulling_fleet(PULLS)
    assert long_picked(fleet) == "p2"
    assert fleet.prefills["p2"].cached_tokens == 384
    # The gateway names the pull that it chose the node for.
    assert fleet.kept_elsewhere(fleet.prefills["p2"], long_prompt()) == KeptPrefix("p1", 11, 384)


@pytest.mark.parametrize(
    "costs", [None, PullCosts(0.3, 1e-9), PullCosts(0.004, 1e-8), PullCosts(float("nan"), float("inf"))]
)
def test_a_node_whose_pulls_are_slow_or_not_measured_yet_is_one_that_lacks_the_prompt(costs: PullCosts | None) -> None:
    """384 tokens are fewer than what a node pulls before it has measured a pull."""
    assert long_picked(pulling_fleet(costs)) == "p1"


def test_nodes_of_another_kind_of_kv_do_not_count_on_pulls_from_each_other() -> None:
    fleet = pulling_fleet(PULLS)
    report = node_status_pb2.NodeStatus()
    report.CopyFrom(fleet.prefills["p2"].status)
    report.info.batch_invariant = True
    fleet.status_received(PREFILL, "p2", report, 0.0)
    assert long_picked(fleet) == "p1"


def test_a_placement_says_which_pull_it_counts_on_and_a_decode_node_pulls_nothing_for_others() -> None:
    placement = pulling_fleet(PULLS).place(long_prompt(), 0.0)
    assert placement is not None
    assert placement.prefill is not None
    assert placement.prefill.address == "p2"
    assert placement.prefill_pull == (
        "pulls 384 tokens from node-11 in about 0.054 s, and would compute them in 0.38 s"
    )
    assert placement.predicted_ttft_s == pytest.approx(0.054 + 384e-5 + 0.016, rel=0.05)
    assert placement.decode.pull_s == 0.0


def test_a_node_that_serves_a_request_alone_says_what_it_pulls_too() -> None:
    fleet = pulling_fleet(PULLS, also_decode=True)
    fleet.lose("d1")
    placement = fleet.place(replace(long_prompt(), excluded_decode=frozenset({11})), 0.0)
    assert placement is not None
    assert placement.route is Route.LOCAL
    assert placement.why == f"{placement.reason}; node-12 {placement.decode.pull}"
    assert placement.decode.cached_tokens == 384


@pytest.mark.parametrize(("head_dim", "picked"), [(64, "p2"), (10**8, "p1")])
def test_a_pull_of_a_model_with_recurrent_states_costs_the_bytes_of_one_too(head_dim: int, picked: str) -> None:
    fleet = pulling_fleet(PULLS)
    for address in ("p1", "p2"):
        report = node_status_pb2.NodeStatus()
        report.CopyFrom(fleet.prefills[address].status)
        report.info.cache_spec.state.CopyFrom(
            node_status_pb2.CacheSpec(
                kind=node_status_pb2.KV_KIND_STATE, num_layers=2, num_kv_heads=1, head_dim=head_dim, dtype="float32"
            )
        )
        fleet.status_received(PREFILL, address, report, 0.0)
    assert fleet.prefills["p2"].view().state_bytes == 8 * head_dim
    assert long_picked(fleet) == picked
    assert fleet.kept_elsewhere(fleet.prefills["p2"], long_prompt()) == KeptPrefix("p1", 11, 384)


@pytest.mark.parametrize(
    ("of_p1", "of_p2", "read_token_s", "picked"),
    [
        pytest.param(b"one", b"one", 1e-5, "p2", id="one-store"),
        pytest.param(b"one", b"other", 1e-5, "p1", id="two-stores"),
        pytest.param(b"", b"one", 1e-5, "p1", id="not-shared"),
        pytest.param(b"one", b"one", 1.0, "p1", id="slower-than-computing"),
    ],
)
def test_a_prompt_that_one_node_keeps_may_be_read_by_all_that_share_its_store(
    of_p1: bytes, of_p2: bytes, read_token_s: float, picked: str
) -> None:
    fleet = pulling_fleet(None)
    for address, shared in (("p1", of_p1), ("p2", of_p2)):
        report = node_status_pb2.NodeStatus()
        report.CopyFrom(fleet.prefills[address].status)
        report.stores.add(name="mooncake", shared=shared, reads_total=100, read_s_total=6400 * read_token_s)
        fleet.status_received(PREFILL, address, report, 0.0)
    assert long_picked(fleet) == picked
    placement = fleet.place(long_prompt(), 0.0)
    assert placement is not None
    assert ("from the shared store" in placement.prefill_pull) == (picked == "p2")
