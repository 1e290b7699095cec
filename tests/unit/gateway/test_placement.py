"""Where a prompt is prefilled, by what the nodes report."""

from dataclasses import replace

import pytest

from baton.core.costs import MIN_SLICE_TOKENS, StepWork, chunk_pairs
from baton.core.types import LocalPolicy, Objective, Slo
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.fleet.placement import Placement, Route, place
from baton.gateway.fleet.prediction import local_steps
from baton.gateway.fleet.router import RoutedRequest
from baton.planner.measured import LLAMA_8B_H200 as COSTS

DECODE = NodeView(
    address="d1",
    incarnation=21,
    revision="m",
    open=True,
    max_context_tokens=1 << 17,
    block_size=32,
    room_tokens=1 << 20,
    requests=32,
    tokens_waiting=0,
    ready_peers=frozenset(),
    costs=COSTS,
    decode_rows=32,
    context_tokens=32 * 1024,
    max_batch_tokens=2048,
    kv_bytes_per_token=131072,
)
PREFILL = replace(
    DECODE, address="p1", incarnation=11, block_size=16, requests=0, decode_rows=0, context_tokens=0,
    ready_peers=frozenset({21, 22}), max_batch_tokens=4096, peer_bytes_per_s={21: 100e9},
)  # fmt: skip
SLO = Slo(ttft_s=1.0, tpot_s=0.02)


def chosen(
    *,
    tokens: int = 4000,
    waits_s: float = 0.0,
    decode: NodeView = DECODE,
    prefill: NodeView = PREFILL,
    slo: Slo = SLO,
    policy: LocalPolicy = LocalPolicy.ELASTIC,
    splittable: bool = True,
) -> Placement:
    wanted = RoutedRequest(tokens, policy, slo=slo, splittable=splittable)
    placement = place([decode], [prefill.with_queue(waits_s)], wanted)
    assert placement is not None
    return placement


def test_an_idle_prefill_node_gets_the_prompt() -> None:
    for slo in (SLO, Slo(), Slo(tpot_s=0.02), Slo(ttft_s=1.0)):
        placement = chosen(slo=slo)
        assert placement.route is Route.REMOTE
        assert placement.predicted_ttft_s == pytest.approx(0.105, rel=0.1)


def test_a_decode_node_with_time_to_spare_takes_prompts_from_a_queue() -> None:
    placement = chosen(waits_s=0.5)
    assert (placement.route, placement.prefill, placement.meets) == (Route.LOCAL, None, True)
    assert placement.reason == "p1 would take 0.596 s of the 1 s to the first token"


@pytest.mark.parametrize("tpot_s", [0.0055, 0.006])
def test_streams_that_need_all_of_their_tpot_get_no_prompts(tpot_s: float) -> None:
    assert chosen(waits_s=0.8, slo=Slo(1.0, tpot_s)).route is Route.REMOTE
    assert chosen(waits_s=5.0, slo=Slo(1.0, tpot_s)).route is Route.REMOTE


def test_without_a_slo_a_long_queue_moves_prompts_and_a_short_one_does_not() -> None:
    assert chosen(waits_s=0.04, slo=Slo()).route is Route.REMOTE
    assert chosen(waits_s=3.0, slo=Slo()).route is Route.LOCAL


@pytest.mark.parametrize("gap_factor", [1.05, 1.2, 1.5, 3.0])
def test_without_a_slo_predictions_count_with_steps_that_keep_the_gaps(gap_factor: float) -> None:
    wanted = RoutedRequest(4000, LocalPolicy.LOCAL, objective=Objective(gap_factor=gap_factor))
    placement = place([DECODE], [], wanted)
    steps = local_steps(DECODE, 4000, wanted)
    assert placement is not None
    assert steps is not None
    plain_s = COSTS.seconds(StepWork(32, 32 * 1024))
    if gap_factor > 1.1:
        assert 0.9 * gap_factor * plain_s < steps.step_s <= gap_factor * plain_s
    else:  # one slice in four steps, of what costs little more than the least one
        least_s = COSTS.seconds(StepWork(32, 32 * 1024, MIN_SLICE_TOKENS, chunk_pairs(2000, 2000 + MIN_SLICE_TOKENS)))
        assert 3 * plain_s + 1.2 * least_s < steps.step_s <= 3 * plain_s + 1.25 * least_s
    assert placement.predicted_ttft_s == pytest.approx(steps.ttft_s(0.0, 0, 4000))


def test_prompts_before_this_one_take_less_while_it_waits_because_steps_become_longer() -> None:
    wanted = RoutedRequest(1000, LocalPolicy.LOCAL)
    short, long = (local_steps(DECODE, 1000, wanted, waiting_s=waiting_s) for waiting_s in (0.001, 2.0))
    assert short is not None
    assert long is not None
    assert short.queue_stretch == pytest.approx(short.stretch, rel=0.02)
    assert long.queue_stretch is not None
    assert long.queue_stretch < 0.95 * long.stretch
    queued = place([DECODE.with_queue(2.0)], [], wanted)
    assert queued is not None
    assert queued.predicted_ttft_s == pytest.approx(long.queue_stretch * 2.0 + long.ttft_s(0.0, 0, 1000))


def test_a_prompt_that_waits_too_long_says_that_it_makes_gaps_longer() -> None:
    waiting = DECODE.with_queue(0.2)
    placement = place([waiting], [PREFILL.with_queue(2.0)], RoutedRequest(400, LocalPolicy.ELASTIC))
    assert placement is not None
    assert placement.route is Route.LOCAL
    assert "; steps of d1 exceed 1.5 times those without prompts, because the prompt takes 0.0" in placement.reason
    short = place([DECODE], [PREFILL.with_queue(2.0)], RoutedRequest(400, LocalPolicy.ELASTIC))
    assert short is not None
    assert "exceed" not in short.reason


def test_where_prompts_are_long_a_prefill_node_takes_fewer_streams() -> None:
    """A stream lets the node compute long prompts in small slices only."""
    busy = replace(DECODE, requests=60, decode_rows=60, context_tokens=60 * 400)
    for typical_tokens, address in ((300, "p1"), (6000, "d1")):
        wanted = RoutedRequest(250, LocalPolicy.ELASTIC, typical_tokens=typical_tokens)
        placement = place([busy, ALONE], [PREFILL], wanted)
        assert placement is not None
        assert placement.decode.address == address


def _with_streams(node: NodeView, rows: int) -> NodeView:
    return replace(node, requests=rows, decode_rows=rows, context_tokens=400 * rows)


def test_outputs_spread_over_nodes_of_both_roles_until_steps_take_equally_long() -> None:
    rows = {"d1": 0, "p1": 0}
    for _ in range(120):
        views = [_with_streams(node, rows[node.address]) for node in (DECODE, ALONE)]
        placement = place(
            views, [_with_streams(PREFILL, rows["p1"])], RoutedRequest(250, LocalPolicy.ELASTIC, typical_tokens=250)
        )
        assert placement is not None
        rows[placement.decode.address] += 1
    assert abs(rows["d1"] - rows["p1"]) <= 30


def test_a_prompt_that_is_too_long_for_either_node_is_split() -> None:
    slow = replace(DECODE, decode_rows=100, context_tokens=100 * 1024)
    placement = chosen(tokens=40_000, waits_s=0.3, decode=slow, slo=Slo(2.6, 0.016))
    assert placement.route is Route.SPLIT
    assert placement.prefill is not None
    assert placement.split_tokens % 32 == 0
    assert 512 <= placement.split_tokens <= 40_000 - 512
    assert placement.predicted_ttft_s is not None
    assert placement.predicted_ttft_s < 2.6
    whole = chosen(tokens=40_000, waits_s=0.3, decode=slow, slo=Slo(2.6, 0.016), splittable=False)
    assert whole.route is not Route.SPLIT


def test_where_nothing_is_in_time_the_first_token_comes_as_early_as_it_can() -> None:
    late = Slo(ttft_s=0.001, tpot_s=0.02)
    assert (chosen(slo=late).route, chosen(slo=late).meets) == (Route.REMOTE, False)
    assert (chosen(slo=late, waits_s=2.0).route, chosen(slo=late, waits_s=2.0).meets) == (Route.LOCAL, False)


def test_policies_leave_no_choice() -> None:
    assert chosen(waits_s=9.0, policy=LocalPolicy.STRICT).route is Route.REMOTE
    local = chosen(policy=LocalPolicy.LOCAL)
    assert (local.route, local.reason) == (Route.LOCAL, "the policy is local")


def test_without_costs_prompts_are_prefilled_remotely() -> None:
    unknown = replace(PREFILL, costs=None)
    assert chosen(prefill=unknown, waits_s=9.0).predicted_ttft_s is None
    assert chosen(prefill=unknown, waits_s=9.0).route is Route.REMOTE
    assert chosen(decode=replace(DECODE, costs=None), waits_s=9.0).route is Route.REMOTE


def test_without_a_prefill_node_the_decode_node_prefills() -> None:
    placement = place([DECODE], [], RoutedRequest(100, LocalPolicy.ELASTIC, slo=SLO))
    assert placement is not None
    assert (placement.route, placement.reason) == (Route.LOCAL, "no prefill node is available")


ALONE = replace(PREFILL, also_prefills=True, ready_peers=frozenset())
BUSY = replace(DECODE, requests=200, decode_rows=200, context_tokens=200 * 1024)
IDLE = replace(DECODE, requests=0, decode_rows=0, context_tokens=0)


def placed(decode: NodeView, slo: Slo, *, alone: NodeView = ALONE, tokens: int = 400) -> Placement:
    placement = place([decode, alone], [PREFILL], RoutedRequest(tokens, LocalPolicy.ELASTIC, slo=slo))
    assert placement is not None
    return placement


def test_a_prefill_node_serves_whole_requests_where_a_hand_over_would_pause_the_output() -> None:
    assert placed(IDLE, Slo(1.0, 0.02)).route is Route.REMOTE
    placement = placed(BUSY, Slo(1.0, 0.02))
    assert (placement.route, placement.decode.address, placement.decode.also_prefills) == (Route.LOCAL, "p1", True)
    assert placement.reason.startswith("a hand-over to d1 would pause the output for 0.02")


def test_a_prefill_node_takes_no_streams_that_would_cut_its_prompts_into_small_slices() -> None:
    assert placed(BUSY, Slo(1.0, 0.007)).route is Route.REMOTE


def test_without_a_slo_a_prefill_node_relieves_a_busy_decode_node() -> None:
    full = replace(BUSY, requests=500, decode_rows=500, context_tokens=500 * 1024)
    placement = placed(full, Slo())
    assert (placement.route, placement.decode.address) == (Route.LOCAL, "p1")
    assert placement.reason.startswith("p1 alone would send the first token after ")
    assert placed(IDLE, Slo()).route is Route.REMOTE


def test_without_a_decode_node_a_prefill_node_serves_alone_unless_the_policy_is_strict() -> None:
    for policy in LocalPolicy:
        placement = place([ALONE], [PREFILL], RoutedRequest(100, policy))
        if policy is LocalPolicy.STRICT:
            assert placement is None
        else:
            assert placement is not None
            assert (placement.route, placement.decode.address) == (Route.LOCAL, "p1")


def test_a_prefill_node_without_costs_or_room_gets_no_whole_requests() -> None:
    unknown = replace(ALONE, costs=None)
    for other in (unknown, replace(ALONE, room_tokens=0)):
        assert placed(BUSY, Slo(1.0, 0.02), alone=other).decode.address == "d1"
    for slo in (Slo(), Slo(1.0, 0.02)):
        assert placed(replace(BUSY, costs=None), slo).route is Route.REMOTE


def test_of_two_decode_nodes_the_one_with_the_earlier_first_token_takes_the_prompt() -> None:
    other = replace(DECODE, address="d2", incarnation=22, requests=40)
    busy = DECODE.with_queue(0.5)
    placement = place([busy, other], [PREFILL.with_queue(0.9)], RoutedRequest(4000, LocalPolicy.ELASTIC, slo=SLO))
    assert placement is not None
    assert (placement.route, placement.decode.address) == (Route.LOCAL, "d2")


def test_the_reason_for_one_node_alone_has_the_numbers_that_decided() -> None:
    """The first token counts three times: a node can be chosen for it although the output ends later there."""
    placement = place([IDLE], [PREFILL.with_queue(1.0)], RoutedRequest(400, LocalPolicy.ELASTIC))
    assert placement is not None
    assert placement.route is Route.LOCAL
    numbers = [float(word) for word in placement.reason.replace(",", " ").split() if word[0].isdigit()]
    first_s, end_s, remote_first_s, remote_end_s = numbers
    assert first_s + 2 * first_s + end_s < remote_end_s + 2 * remote_first_s


def test_an_unpaired_prefill_node_is_not_called_unavailable() -> None:
    placement = place([IDLE], [replace(PREFILL, ready_peers=frozenset())], RoutedRequest(100, LocalPolicy.ELASTIC))
    assert placement is not None
    assert placement.reason == "no prefill node is paired with d1"


def test_a_prefill_node_whose_streams_leave_no_time_has_a_reason_without_numbers() -> None:
    full = replace(PREFILL, decode_rows=500, requests=500, context_tokens=500 * 4096)
    placement = place([IDLE], [full], RoutedRequest(400, LocalPolicy.ELASTIC, slo=Slo(1.0, 0.008)))
    assert placement is not None
    assert placement.reason == "the streams on p1 leave it no time for prompts"


def test_reasons_name_nodes_and_no_addresses() -> None:
    prefill = replace(PREFILL, address="10.0.0.1:7000", name="prefill-0")
    decode = replace(DECODE, address="10.0.0.2:7000", name="decode-0")
    for waits_s, rows, slo in ((0.5, 32, SLO), (3.0, 32, Slo()), (2.0, 32, Slo(0.001, 0.02)), (0.0, 200, SLO)):
        busy = replace(decode, decode_rows=rows, requests=rows, context_tokens=rows * 1024)
        alone = replace(prefill, also_prefills=True, ready_peers=frozenset())
        placement = place(
            [busy, alone], [prefill.with_queue(waits_s)], RoutedRequest(400, LocalPolicy.ELASTIC, slo=slo)
        )
        assert placement is not None
        assert placement.reason
        assert "10.0.0" not in placement.reason


def test_of_equal_nodes_that_serve_alone_the_one_chosen_longest_ago_is_taken() -> None:
    full = replace(BUSY, requests=500, decode_rows=500, context_tokens=500 * 1024)
    others = [replace(ALONE, address=f"p{number}", incarnation=10 + number, turn=5 - number) for number in (1, 2, 3)]
    placement = place([full, *others], [PREFILL], RoutedRequest(400, LocalPolicy.ELASTIC))
    assert placement is not None
    assert placement.decode.address == "p3"
