"""The choice of nodes counts what draft tokens make of their steps."""

import math
from dataclasses import replace

import pytest

from baton.core.costs import StepWork
from baton.core.decode_pace import PLAIN_PACE, DecodePace
from baton.core.types import LocalPolicy, Slo
from baton.gateway.fleet.node_report import to_view
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.fleet.placement import Placement, place
from baton.gateway.fleet.prediction import hand_over_s, local_steps, output_s
from baton.gateway.fleet.router import OUTPUT_TOKENS, RoutedRequest, decode_s, mean_token_ratio, token_s
from baton.planner.measured import LLAMA_8B_H200 as COSTS
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert_node import costs_to_proto

ROWS, CONTEXT = 16, 1024
# Steps are half longer, and bring three tokens each: half of the time per token.
SPECULATING = DecodePace(step_ratio=1.5, tokens=3.0, prompt_step_ratio=1.4)
WANTED = RoutedRequest(1000, LocalPolicy.ELASTIC)


def reported(name: str, number: int, pace: DecodePace | None, *, rows: int = ROWS) -> NodeView:
    """The view of a node that has sent a status."""
    status = node_status_pb2.NodeStatus(
        blocks_open=[100_000],
        requests_running=rows,
        decode_rows=rows,
        context_tokens=rows * CONTEXT,
        max_batch_requests=256,
        max_batch_tokens=2048,
        step_costs=costs_to_proto(COSTS),
        guessed_step_ratio=0.0 if pace is None else pace.step_ratio,
        guessed_step_tokens=0.0 if pace is None else pace.tokens,
        guessed_prompt_step_ratio=0.0 if pace is None else pace.prompt_step_ratio,
    )
    status.info.incarnation, status.info.max_context_tokens, status.info.cache_shape.block_size = number, 1 << 17, 16
    peers = frozenset({21, 22}) if name.startswith("p") else frozenset[int]()
    return replace(to_view(name, "m", status, COSTS), room_tokens=1 << 20, ready_peers=peers)


PREFILL = reported("p1", 11, PLAIN_PACE, rows=0)


def chosen(*decodes: NodeView, prefill: NodeView = PREFILL, wanted: RoutedRequest = WANTED) -> Placement:
    placement = place(decodes, [prefill], wanted)
    assert placement is not None
    return placement


@pytest.mark.parametrize(
    "pace",
    [(0.0, 0.0, 0.0), (1.5, 0.5, 1.0), (-1.0, 2.0, 1.0), (1.5, 2.0, math.nan), (1.5, math.inf, 1.0), (1e9, 2.0, 1.0)],
)
def test_a_pace_that_cannot_be_counts_as_none(pace: tuple[float, float, float]) -> None:
    assert reported("d1", 21, DecodePace(*pace)).pace is None


def test_the_time_per_token_is_that_of_a_step_by_its_tokens() -> None:
    node = reported("d1", 21, SPECULATING)
    wanted = replace(WANTED, token_ratio=mean_token_ratio([node]))
    assert token_s(node, wanted) == pytest.approx(decode_s(node, WANTED) / 2)
    assert output_s(node, wanted) == pytest.approx(OUTPUT_TOKENS * decode_s(node, WANTED) / 2)
    assert hand_over_s(PREFILL, node, wanted) > 2.9 * decode_s(node, WANTED), "two of the longer steps"


@pytest.mark.parametrize("slo", [Slo(), Slo(ttft_s=1.0, tpot_s=0.02)])
@pytest.mark.parametrize("queue_s", [0.0, 0.3, 3.0])
def test_nodes_that_draft_nothing_now_are_chosen_as_if_they_never_did(slo: Slo, queue_s: float) -> None:
    wanted = replace(WANTED, slo=slo)
    plain, off = (
        chosen(*(reported(name, number, pace) for name, number in (("d1", 21), ("d2", 22))),
            prefill=PREFILL.with_queue(queue_s), wanted=wanted)
        for pace in (PLAIN_PACE, None)
    )  # fmt: skip
    assert replace(plain, decode=off.decode) == off
    assert plain.decode.address == off.decode.address


def test_an_idle_node_counts_as_fast_as_one_whose_requests_are_drafted_for() -> None:
    """Else a node with requests would look twice as fast as an empty one, and get all others too."""
    busy, idle = reported("d1", 21, SPECULATING), reported("d2", 22, PLAIN_PACE, rows=0)
    assert chosen(busy, idle).decode is idle
    assert chosen(busy, replace(idle, pace=None)).decode is busy, "this one never drafts"


def test_equal_nodes_stay_equal_whatever_their_requests_say() -> None:
    """How many drafts are accepted depends on the requests, so it says nothing about the next one."""
    code, prose = reported("d1", 21, SPECULATING, rows=20), reported("d2", 22, DecodePace(1.1, 1.2), rows=16)
    assert mean_token_ratio([code, prose]) == pytest.approx((20 * 0.5 + 16 * 1.1 / 1.2) / 36)
    assert chosen(code, prose).decode is prose, "the one with fewer requests"


def test_prompts_next_to_drafts_are_computed_in_smaller_slices_of_longer_steps() -> None:
    plain_s = COSTS.seconds(StepWork(ROWS, ROWS * CONTEXT))
    for wanted, bound_s in (
        (WANTED, 1.5 * plain_s),
        (replace(WANTED, slo=Slo(tpot_s=2 * plain_s)), 1.8 * plain_s),
    ):
        without, found = (local_steps(reported("d1", 21, pace), 1000, wanted) for pace in (PLAIN_PACE, SPECULATING))
        assert without is not None
        assert found is not None
        assert without.step_s == pytest.approx(bound_s, rel=0.02)
        # Prompts lose half of the time above the plain step in the 0.4 of the steps that have drafts.
        assert found.step_s == pytest.approx(1.4 * plain_s + 0.8 * (bound_s - plain_s), rel=0.02)
        assert found.slice_tokens < 0.9 * without.slice_tokens
        assert found.ttft_s(0.0, 0, 1000) > 1.1 * without.ttft_s(0.0, 0, 1000)
