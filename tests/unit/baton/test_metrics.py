"""The table of metrics keeps Prometheus' rules, counting is exact, and the page reads back as what was counted."""

import re
from collections.abc import Iterable

import pytest
from prometheus_client import parser
from prometheus_client.samples import Sample

from baton.core import errors
from baton.core.errors import BatonError
from baton.core.types import FinishReason, Path
from baton.metrics.declared import LOST, METRICS, REASONS, SERVED_MODEL, metrics_of
from baton.metrics.exposition import Exposition, Figure
from baton.metrics.metric import Metric, MetricKind, ProcessRole
from baton.metrics.tally import Layout, Tally
from kvtransfer.refusals import SegmentRefusal

UNITS = {"seconds": "_seconds", "bytes": "_bytes", "bytes per second": "_bytes_per_second", "ratio": "_perc"}


def label_values(metric: str, label: str) -> set[str]:
    (found,) = [each for one in METRICS if one.name == metric for each in one.labels if each.name == label]
    return set(found.values)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_name_keeps_the_rules_that_promtool_checks(metric: Metric) -> None:
    assert re.fullmatch(r"(baton|gen_ai_server)_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") is (metric.kind is MetricKind.COUNTER)
    assert not metric.name.endswith(("_count", "_sum", "_bucket"))
    assert metric.name.removesuffix("_total").endswith(UNITS.get(metric.unit, ""))
    assert metric.meaning
    assert not metric.meaning.endswith(".")
    assert bool(metric.bounds) is (metric.kind is MetricKind.HISTOGRAM)
    assert list(metric.bounds) == sorted(set(metric.bounds))
    names = [label.name for label in metric.labels]
    assert {"le", "quantile", "role", "model_name", "instance", "job"}.isdisjoint(names)


def test_no_name_is_declared_twice() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


@pytest.mark.parametrize("role", ProcessRole)
def test_a_process_has_a_bounded_number_of_series(role: ProcessRole) -> None:
    assert sum(metric.series_max for metric in metrics_of(role)) < 860


def test_closed_labels_have_every_value_that_the_code_has() -> None:
    all_errors = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, BatonError)]
    assert {each.reason for each in all_errors} == set(REASONS)
    assert label_values("baton_output_retries_total", "reason") == {*REASONS, LOST}
    assert label_values("baton_output_success_total", "finish_reason") == set(FinishReason)
    assert label_values("baton_output_path_total", "path") == set(Path)
    assert label_values("baton_kv_segments_refused_total", "reason") == {each.name.lower() for each in SegmentRefusal}


def text_of(role: ProcessRole, tally: Tally, *figures: Figure, model: str = "m") -> str:
    exposition = Exposition(role, tally.layout, model, process=False)
    return b"".join(exposition.pages(tally.own(), figures)).decode()


def test_a_reader_may_want_some_metrics_only() -> None:
    tally = Tally(Layout(ProcessRole.GATEWAY))
    exposition = Exposition(ProcessRole.GATEWAY, tally.layout, "m")
    names = frozenset({"baton_ready", "baton_requests_total", "unknown"})
    text = b"".join(exposition.pages(tally.own(), [Figure("baton_ready", 1)], names)).decode()
    assert {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")} == {
        "baton_ready",
        "baton_requests_total",
    }
    assert value(text, "baton_requests_total", outcome="failed") == 0


def samples_of(text: str) -> list[Sample]:
    return [sample for family in parser.text_string_to_metric_families(text) for sample in family.samples]


def value(text: str, name: str, **labels: str) -> float:
    return value_in(samples_of(text), name, **labels)


def value_in(samples: Iterable[Sample], name: str, **labels: str) -> float:
    (found,) = [each.value for each in samples if each.name == name and labels.items() <= each.labels.items()]
    return float(found)


def test_a_histogram_reads_back_as_what_was_observed() -> None:
    tally = Tally(Layout(ProcessRole.GATEWAY))
    gaps = tally.histogram("baton_inter_token_latency_seconds")
    gaps.observe(0.01)
    gaps.observe(0.0101, 3)
    gaps.observe(7.5)
    text = text_of(ProcessRole.GATEWAY, tally)
    bucket = "baton_inter_token_latency_seconds_bucket"
    assert [value(text, bucket, le=bound) for bound in ("0.005", "0.01", "0.015", "2.5", "+Inf")] == [0, 1, 4, 4, 5]
    assert value(text, "baton_inter_token_latency_seconds_count") == 5
    assert value(text, "baton_inter_token_latency_seconds_sum") == pytest.approx(0.01 + 3 * 0.0101 + 7.5)


def test_series_do_not_share_cells() -> None:
    tally = Tally(Layout(ProcessRole.GATEWAY))
    for number, (metric, labels, _) in enumerate(tally.layout.series(), 1):
        if metric.kind is MetricKind.COUNTER:
            tally.counter(metric.name, *labels).add(number)
        else:
            tally.histogram(metric.name, *labels).observe(1e9, number)
    samples = samples_of(text_of(ProcessRole.GATEWAY, tally))
    for number, (metric, labels, _) in enumerate(tally.layout.series(), 1):
        name = metric.name if metric.kind is MetricKind.COUNTER else f"{metric.name}_count"
        shown = ["m" if label == SERVED_MODEL else label for label in labels]
        named = dict(zip((each.name for each in metric.labels), shown, strict=True))
        assert value_in(samples, name, **named) == number


def test_a_figure_stands_for_the_cell_of_its_series() -> None:
    tally = Tally(Layout(ProcessRole.PREFILL))
    text = text_of(ProcessRole.PREFILL, tally, Figure("baton_num_preemptions_total", 3))
    assert value(text, "baton_num_preemptions_total") == 3


def test_names_that_others_chose_stay_one_label_value_of_bounded_length() -> None:
    name = 'p"0\nbaton_forged 1\\' + "x" * 5000
    text = text_of(
        ProcessRole.DECODE, Tally(Layout(ProcessRole.DECODE)), Figure("baton_link_latency_seconds", 0.5, (name,))
    )
    assert not any(line.startswith("baton_forged") for line in text.splitlines())
    (family,) = [
        each for each in parser.text_string_to_metric_families(text) if each.name == "baton_link_latency_seconds"
    ]
    (sample,) = family.samples
    assert sample.value == 0.5
    assert sample.labels["peer"].startswith('p"0\nbaton_forged 1\\x')
    assert len(sample.labels["peer"]) == 200
