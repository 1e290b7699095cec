"""Alerts, dashboard and their pages name what exists: metrics, labels, values, headings. promtool runs the alerts."""

import re
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import ROOT
from tests.deploy.promql import faults, labels

MONITORING = ROOT / "deploy" / "monitoring"
PAGE = "docs/operations.md"

RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"] for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"]: labels(rule["expr"], {}) for rule in RULES if "record" in rule}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_metric_and_label_of_a_rule_is_declared(rule: dict[str, Any]) -> None:
    assert faults(rule["expr"], RECORDED) == []


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("baton_request_total", "baton_request_total is not declared"),
        ("baton:failed:ratio_1m > 1", "baton:failed:ratio_1m is not declared"),
        ("rate(baton_time_to_first_token_seconds[5m])", "baton_time_to_first_token_seconds is not declared"),
        ("baton_pairs_ready_sum", "baton_pairs_ready_sum is not declared"),
        ('baton_requests_total{reason="failed"}', "baton_requests_total has no label reason"),
        ('baton_requests_total{outcome="fails"}', "baton_requests_total has no outcome 'fails'"),
        ('baton_kv_segments_refused_total{reason=~"seal|digests"}', "has no reason 'digests'"),
        ('baton_pairs_ready{role="gateway"}', "baton_pairs_ready has no role 'gateway'"),
        ("sum by (state) (baton_requests_total)", "has the label state"),
        ("sum by (le) (baton_requests_total)", "has the label le"),
        ("up == 0", "has no metric of Baton"),
    ],
)
def test_a_name_that_does_not_exist_is_found(expression: str, fault: str) -> None:
    (found,) = faults(expression, RECORDED)
    assert fault in found


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_severity_summary_and_its_heading_in_the_page(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("warning", "critical")
    assert alert["annotations"]["runbook_url"] == f"{PAGE}#{name.lower()}"
    used = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]))
    assert used <= labels(alert["expr"], RECORDED)


def test_the_page_has_every_alert_and_no_other() -> None:
    section = (ROOT / PAGE).read_text().split("\n## Alerts\n")[1].split("\n## ")[0]
    assert re.findall(r"^### (\w+)$", section, re.MULTILINE) == list(ALERTS)
    assert section.count("**Cause.**") == section.count("**Cure.**") == len(ALERTS)


def test_every_alert_has_a_unit_test_in_which_it_fires() -> None:
    tests = yaml.safe_load((MONITORING / "rules_test.yaml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == set(ALERTS)
