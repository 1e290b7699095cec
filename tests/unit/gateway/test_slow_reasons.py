"""Which requests are called slow, and why: above the SLO, or far above what is usual."""

from typing import Any

from baton.gateway.observe.recent import Shown
from baton.gateway.observe.slow_reasons import mark_slow


def request(first_s: float | None = 0.1, gap_s: float | None = 0.01, **changes: Any) -> Shown:
    found: Shown = {
        "outcome": "finished", "error": "", "failures": "", "ttft_s": first_s, "gap_s": gap_s,
        "phases": [["admission", 0.0, 0.01], ["queue", 0.01, 0.07], ["prefill", 0.07, 0.1], ["tokens", 0.1, 9.0]],
    }  # fmt: skip
    return found | changes


def marked(*requests: Shown, ttft_s: float | None = None, tpot_s: float | None = None) -> list[list[str]]:
    mark_slow(requests, ttft_s=ttft_s, tpot_s=tpot_s)
    return [each["slow"] for each in requests]


def test_above_the_slo_is_slow_with_what_took_the_longest_until_the_first_token() -> None:
    (why,) = marked(request(0.1, 0.01), ttft_s=0.05, tpot_s=0.02)
    assert why == ["first token after 100 ms, above 50 ms: 60 ms for its first prefill step"]
    (why,) = marked(request(0.1, 0.03), ttft_s=0.2, tpot_s=0.02)
    assert why == ["30 ms between tokens, above 20 ms"]
    assert marked(request(0.1, 0.01), ttft_s=0.1, tpot_s=0.01) == [[]]


def test_without_an_slo_three_medians_are_usual() -> None:
    usual = [request(0.1, 0.02) for _ in range(4)]
    *others, slow = marked(*usual, request(0.31, 0.061))
    assert others == [[], [], [], []]
    assert slow == [
        "first token after 310 ms, above 300 ms: 60 ms for its first prefill step",
        "61 ms between tokens, above 60 ms",
    ]
    assert marked(*usual, request(0.3, 0.06)) == [[]] * 5


def test_few_requests_have_no_usual_and_nothing_fast_is_slow() -> None:
    assert marked(*[request(0.1)] * 3, request(60.0)) == [[]] * 4
    assert marked(*[request(0.001, 0.0001)] * 9, request(0.05, 0.01)) == [[]] * 10


def test_failures_say_what_happened_also_without_any_token() -> None:
    failed = request(None, None, outcome="failed", error="no node", phases=[["admission", 0.0, 1.0]])
    assert marked(failed, ttft_s=0.1, tpot_s=0.1) == [["failed: no node"]]
    retried = request(failures="decode-0 was lost")
    assert marked(retried, ttft_s=1.0, tpot_s=1.0) == [["tried again: decode-0 was lost"]]


def test_a_request_without_phases_before_its_first_token_is_slow_without_a_cause() -> None:
    assert marked(request(phases=[]), ttft_s=0.05) == [["first token after 100 ms, above 50 ms"]]
