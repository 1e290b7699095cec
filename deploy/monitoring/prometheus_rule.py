"""Writes rules.yaml as an object of the Prometheus operator, for the kustomize component; `make docs` calls it."""

from pathlib import Path

HERE = Path(__file__).resolve().parent
RULES = HERE / "rules.yaml"
OBJECT = HERE.parent / "kustomize" / "components" / "monitoring" / "prometheus-rule.yaml"

_HEAD = """# Written by `make docs` from deploy/monitoring/rules.yaml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: baton
  namespace: baton
spec:
"""


def prometheus_rule() -> str:
    """The object's text: the rules as they are, below `spec`."""
    lines = [line for line in RULES.read_text().splitlines() if not line.startswith("#")]
    return _HEAD + "".join(f"  {line}\n" for line in lines)


if __name__ == "__main__":
    OBJECT.write_text(prometheus_rule())
