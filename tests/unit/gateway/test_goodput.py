"""Elastic nodes serve at least what the better of both fixed modes does, by a model with a real node's step costs."""

import pytest

from baton.types import LocalPolicy, Slo
from gateway.placement import Way
from tests.unit.gateway.goodput_model import Lengths, attainment, chat, long

CHAT_TTFT_S, LONG_TTFT_S = 0.4, 2.0


# The rates are those at which the better fixed mode, always remote in all of these, just serves 90 % (bisected).
@pytest.mark.parametrize(
    ("lengths", "slo", "rate", "seconds"),
    [
        (chat, Slo(CHAT_TTFT_S, 0.010), 112.0, 4.0),
        (chat, Slo(CHAT_TTFT_S, 0.030), 148.0, 4.0),
        (long, Slo(LONG_TTFT_S, 0.010), 5.7, 20.0),
        (long, Slo(LONG_TTFT_S, 0.050), 5.7, 20.0),
    ],
)
@pytest.mark.parametrize("nodes", [1, 2])
def test_elastic_nodes_serve_what_the_better_fixed_mode_serves(
    lengths: Lengths, slo: Slo, rate: float, seconds: float, nodes: int
) -> None:
    met = {
        policy: attainment(lengths, nodes * rate, slo, seconds=seconds, prefills=nodes, decodes=nodes, policy=policy)[0]
        for policy in (LocalPolicy.STRICT, LocalPolicy.LOCAL, LocalPolicy.ELASTIC)
    }
    assert met[LocalPolicy.ELASTIC] >= max(0.9, max(met.values()) - 0.01), met


@pytest.mark.parametrize(("tpot_s", "nodes"), [(0.010, 1), (0.010, 2), (0.050, 1)])
def test_a_queue_of_long_prompts_is_served_by_both_roles(tpot_s: float, nodes: int) -> None:
    """At 1.3 times the goodput of the better fixed mode."""
    slo, rate = Slo(LONG_TTFT_S, tpot_s), 1.3 * 5.75 * nodes
    elastic, ways = attainment(long, rate, slo, seconds=30, prefills=nodes, decodes=nodes)
    assert elastic >= 0.9
    assert ways[Way.LOCAL] > 0.1 * sum(ways.values())
