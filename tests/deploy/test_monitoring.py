"""Alerts, dashboard and their pages name what exists: metrics, labels, values, headings. promtool runs the alerts."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.monitoring import dashboard, prometheus_rule
from tests.deploy.manifests import BASE, KUSTOMIZE, ROOT, render
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


def test_the_operators_object_has_the_rules(tmp_path: Path) -> None:
    assert prometheus_rule.OBJECT.read_text() == prometheus_rule.prometheus_rule(), "run `make docs`"
    here = tmp_path.resolve()
    (here / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        f"resources: [{os.path.relpath(BASE, here)}]\n"
        f"components: [{os.path.relpath(KUSTOMIZE / 'components' / 'monitoring', here)}]\n"
    )
    made = render(here).find("PrometheusRule", "baton")
    assert made["spec"] == yaml.safe_load((MONITORING / "rules.yaml").read_text())
    assert made["metadata"]["namespace"] == "baton"


def test_runbook_links_can_lead_to_a_site(capsys: pytest.CaptureFixture[str]) -> None:
    page = "https://docs.example.org/operations/"
    for as_object in ([], ["--object"]):
        prometheus_rule.main(["--runbook", page, *as_object])
        made = yaml.safe_load(capsys.readouterr().out)
        found = [rule for group in made.get("spec", made)["groups"] for rule in group["rules"] if "alert" in rule]
        links = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in found}
        assert links == {name: f"{page}#{name.lower()}" for name in ALERTS}


def test_the_dashboard_is_made_from_its_table() -> None:
    assert dashboard.FILE.read_text() == dashboard.dashboard(), "run `make docs`"


PANELS = [panel for row in dashboard.ROWS.values() for panel in row]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_every_metric_and_label_of_a_panel_is_declared(panel: dashboard.Panel) -> None:
    for legend, expression in zip(panel.lines, panel.expressions, strict=True):
        assert faults(expression, RECORDED) == []
        assert set(re.findall(r"{{(\w+)}}", legend)) <= labels(expression, RECORDED)


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in json.loads(dashboard.dashboard())["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
