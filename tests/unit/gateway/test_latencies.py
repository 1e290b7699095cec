"""Percentiles of the charts come from histograms, as Prometheus finds them."""

from baton.gateway.core.shared_counters import SharedCounters
from baton.gateway.observe.latencies import Latencies, quantile
from baton.gateway.observe.meter import RequestMeter


def test_a_percentile_lies_in_its_bucket_and_nothing_counted_has_none() -> None:
    assert quantile((1.0, 2.0), [0, 4, 0], 0.5) == 1.5
    assert quantile((1.0, 2.0), [0, 0, 4], 0.5) == 2.0
    assert quantile((1.0, 2.0), [0, 0, 0], 0.5) is None


def test_a_point_has_what_came_since_the_window_began() -> None:
    counters = SharedCounters()
    latencies = Latencies(counters)
    latencies.read()
    RequestMeter(counters.tally).first(0.2, 1, 10)
    latencies.read()
    first, second = latencies.points
    assert first.values == (None, None, None, None)
    assert second.values[0] is not None
    assert second.values[2] is None
