"""Writes rules.yaml for the Prometheus operator: into the kustomize component and the Helm chart. For `make docs`."""

from pathlib import Path

HERE = Path(__file__).resolve().parent
RULES = HERE / "rules.yaml"
OBJECT = HERE.parent / "kustomize" / "components" / "monitoring" / "prometheus-rule.yaml"
# A chart's templates read no file outside the chart.
IN_CHART = HERE.parent / "helm" / "baton" / "files" / "rules.yaml"

_HEAD = """# Written by `make docs` from deploy/monitoring/rules.yaml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: baton
  namespace: baton
  labels: {app.kubernetes.io/name: baton}
spec:
"""


def prometheus_rule() -> str:
    """The object's text: the rules as they are, below `spec`."""
    return _HEAD + "".join(f"  {line}\n" for line in chart_rules().splitlines())


def chart_rules() -> str:
    """The rules without the comments for their maintainer."""
    return "".join(line for line in RULES.read_text().splitlines(keepends=True) if not line.startswith("#"))


if __name__ == "__main__":
    OBJECT.write_text(prometheus_rule())
    IN_CHART.write_text(chart_rules())
