"""How much more work nodes take, from their reports."""

from dataclasses import replace

from baton.core.costs import StepCosts
from baton.core.decode_pace import PLAIN_PACE, DecodePace
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.serving.node_capacity import CapacityReader, enough_rows

COSTS = StepCosts(((1, 0.010), (64, 0.030), (256, 0.080)))
DECODE = NodeView(
    "d", 1, "", True, 4096, 16, 1600, 8, 0, frozenset(), costs=COSTS, decode_rows=8, context_tokens=800,
    max_batch_requests=16,
)  # fmt: skip
PREFILL = NodeView("p", 2, "", True, 4096, 16, 1600, 0, 0, frozenset(), costs=COSTS, backlog_s=0.2)


def test_a_decode_node_takes_as_many_as_it_has_seats_and_some_whose_prompts_are_computed() -> None:
    (node,) = CapacityReader().of([DECODE], [PREFILL]).decodes
    assert (node.load, node.most, node.slots) == (8, 20, 1600)
    assert node.most_shared <= node.most


def test_what_was_sent_since_the_report_and_what_is_on_its_way_counts() -> None:
    sent = replace(DECODE, requests_since=3, room_tokens=1000)
    busy = replace(PREFILL, requests=5, decode_rows=1)
    (node,) = CapacityReader().of([sent], [busy]).decodes
    assert (node.load, node.slots) == (8 + 3 + 4, 1000)


def test_the_prefill_node_that_is_free_first_counts_and_unknown_ones_do_not() -> None:
    slow, unknown = replace(PREFILL, backlog_s=5.0), replace(PREFILL, costs=None)
    room = CapacityReader().of([DECODE], [slow, PREFILL, unknown])
    assert room.prefill_wait_s == 0.2
    assert CapacityReader().of([DECODE], [unknown]).prefill_wait_s == 0.0
    assert CapacityReader(ttft_s=2.0).of([DECODE], [PREFILL]).prefill_most_s == 1.0


def test_without_prefill_nodes_the_decode_nodes_prompts_wait() -> None:
    room = CapacityReader().of([replace(DECODE, backlog_s=0.5)], [])
    assert room.prefill_wait_s == 0.5
    assert not room.has(10, 1, shared=False)


def test_step_times_are_those_of_one_more_request_on_the_least_loaded_node() -> None:
    room = CapacityReader().of([replace(DECODE, requests=30), DECODE], [PREFILL])
    assert room.step_s == COSTS.dense_s(9)
    assert CapacityReader().of([replace(DECODE, costs=None)], [PREFILL]).step_s is None


def test_times_per_token_count_with_draft_tokens() -> None:
    speculating = replace(DECODE, pace=DecodePace(step_ratio=1.5, tokens=3.0))
    room = CapacityReader().of([speculating], [PREFILL])
    assert (room.step_s, room.alone_s) == (COSTS.dense_s(9) / 2, COSTS.dense_s(1) / 2)
    idle = replace(speculating, requests=0, decode_rows=0, context_tokens=0, pace=PLAIN_PACE)
    assert CapacityReader().of([idle, speculating], []).alone_s == COSTS.dense_s(1) / 2, "as on the other node"
    assert CapacityReader().of([replace(idle, pace=None), speculating], []).alone_s == COSTS.dense_s(1)


def test_rows_are_enough_where_more_of_them_gain_next_to_nothing() -> None:
    flat = StepCosts(((1, 0.01), (512, 0.012)))
    assert enough_rows(flat, 512) >= 448, "every row is for free"
    steep = StepCosts(((1, 0.01), (4, 0.01), (512, 1.28)))
    assert enough_rows(steep, 512) == 4
    assert enough_rows(steep, 2) == 2
    assert 32 < enough_rows(COSTS, 64) < 60


def test_new_costs_are_looked_at_again() -> None:
    reader = CapacityReader()
    before = reader.of([replace(DECODE, max_batch_requests=64)], []).decodes[0].most_shared
    steep = StepCosts(((1, 0.01), (4, 0.01), (512, 1.28)))
    after = reader.of([replace(DECODE, max_batch_requests=64, costs=steep)], []).decodes[0].most_shared
    assert after == 6 < before


def test_a_cluster_without_nodes_decides_nothing() -> None:
    room = CapacityReader().of([], [])
    assert room.has(10_000, 5, shared=True)
    assert room.is_light


def test_a_few_requests_wait_for_blocks_on_the_node() -> None:
    full = replace(DECODE, room_tokens=0, max_batch_requests=64)
    assert CapacityReader().of([full], [PREFILL]).has(100, 1, shared=False)
    assert not CapacityReader().of([replace(full, requests=16)], [PREFILL]).has(100, 1, shared=False)
