"""Where a prompt is prefilled, if the gateway will hold the first token of its hand-over."""

from dataclasses import replace

import pytest

from baton.core.types import LocalPolicy, Slo
from baton.gateway.fleet.placement import Placement, Route, place
from baton.gateway.fleet.prediction import hand_over_s
from baton.gateway.fleet.router import RoutedRequest, decode_s
from tests.unit.gateway.test_placement import ALONE, BUSY, DECODE, PREFILL

NO_SLO = Slo()


def chosen(
    second_token_s: float, *, tokens: int = 4000, slo: Slo = NO_SLO, policy: LocalPolicy = LocalPolicy.ELASTIC
) -> Placement:
    decode = DECODE.with_queue(0.0, second_token_s=second_token_s)
    placement = place([decode], [PREFILL], RoutedRequest(tokens, policy, slo=slo))
    assert placement is not None
    return placement


def test_the_first_token_is_predicted_to_come_later_by_the_time_that_it_is_held() -> None:
    wanted = RoutedRequest(4000, LocalPolicy.STRICT)
    unknown, known = (chosen(each, policy=LocalPolicy.STRICT) for each in (0.0, 0.018))
    assert unknown.held_s == 0.0
    assert known.held_s == pytest.approx(0.018 - 1.5 * decode_s(DECODE, wanted))
    assert unknown.predicted_ttft_s is not None
    assert known.predicted_ttft_s == pytest.approx(unknown.predicted_ttft_s + known.held_s)


def test_a_short_prompt_is_not_handed_over_if_its_first_token_would_be_held_for_longer_than_that_saves() -> None:
    busy = replace(DECODE, requests=60, decode_rows=60, context_tokens=60 * 1024)
    routes = []
    for second_token_s in (0.0, 0.018, 0.045):
        decode = busy.with_queue(0.0, second_token_s=second_token_s)
        placement = place([decode], [PREFILL], RoutedRequest(800, LocalPolicy.ELASTIC))
        assert placement is not None
        routes.append(placement.route)
    assert routes == [Route.REMOTE, Route.REMOTE, Route.LOCAL]


def test_a_hand_over_keeps_the_tpot_once_the_gateway_knows_how_long_to_hold_the_first_token() -> None:
    slo = Slo(ttft_s=1.0, tpot_s=0.02)
    wanted = RoutedRequest(400, LocalPolicy.ELASTIC, slo=slo)
    gap_s = hand_over_s(PREFILL, BUSY, wanted)
    assert decode_s(BUSY, wanted) < 0.02 < gap_s
    unknown, known = (
        place([BUSY.with_queue(0.0, second_token_s=each), ALONE], [PREFILL], wanted) for each in (0, gap_s)
    )
    assert unknown is not None
    assert known is not None
    assert (unknown.route, known.route) == (Route.LOCAL, Route.REMOTE)
    assert known.held_s == pytest.approx(gap_s - 0.02)


def test_a_first_token_that_is_late_already_is_not_held() -> None:
    late = chosen(0.02, slo=Slo(ttft_s=0.08, tpot_s=0.009), policy=LocalPolicy.STRICT)
    assert (late.held_s, late.meets) == (0.0, False)
