"""Writes rules.yaml for the Prometheus operator: into the kustomize component and the Helm chart. For `make docs`.

With `--runbook URL` it prints the rules instead, with links to that page in place of the path in the repository.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
RULES = HERE / "rules.yaml"
OBJECT = HERE.parent / "kustomize" / "components" / "monitoring" / "prometheus-rule.yaml"
PAGE = "docs/operations.md"
# A chart's templates read no file outside the chart.
IN_CHART = HERE.parent / "helm" / "baton" / "files" / "rules.yaml"

_HEAD = """# Written by `make docs` from deploy/monitoring/rules.yaml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: baton
  namespace: baton
  # The Prometheus of kube-prometheus-stack selects rules with its own release's name. Change it in your overlay.
  labels: {app.kubernetes.io/name: baton, release: kube-prometheus-stack}
spec:
"""


def rules(runbook: str = PAGE) -> str:
    """The text of rules.yaml; `runbook` is the address of the page that has a heading for each alert."""
    return RULES.read_text().replace(f"runbook_url: {PAGE}#", f"runbook_url: {runbook}#")


def prometheus_rule(runbook: str = PAGE) -> str:
    """The object's text: the rules as they are, below `spec`."""
    return _HEAD + "".join(f"  {line}\n" for line in chart_rules(runbook).splitlines())


def chart_rules(runbook: str = PAGE) -> str:
    """The rules without the comments for their maintainer."""
    return "".join(line for line in rules(runbook).splitlines(keepends=True) if not line.startswith("#"))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Without options: write the rules into the kustomize component and the Helm chart."
    )
    parser.add_argument("--runbook", metavar="URL", help="print the rules with links to docs/operations.md at this URL")
    parser.add_argument("--object", action="store_true", help="with --runbook: as an object of the Prometheus operator")
    given = parser.parse_args(arguments)
    if given.runbook is None:
        OBJECT.write_text(prometheus_rule())
        IN_CHART.write_text(chart_rules())
    else:
        print((prometheus_rule if given.object else rules)(given.runbook), end="")  # noqa: T201


if __name__ == "__main__":
    main()
