"""Renders the Helm chart as `helm template` does, in a process of its own: Helm is a library with Go's runtime."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.manifests import ROOT, Rendered

CHART = ROOT / "deploy" / "helm" / "baton"
VALUES = ROOT / "deploy" / "helm" / "values"

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Release:
    """What Helm makes of some values."""

    rendered: Rendered
    notes: str
    # Of helm lint: messages of warnings and errors.
    complaints: tuple[str, ...]


class Refused(Exception):
    """Helm refuses the values; the message is Helm's."""


def release(*values: Values, name: str = "baton", namespace: str = "baton") -> Release:
    """Renders and lints the chart with values, of which later ones win."""
    request = {"values": merged(values), "name": name, "namespace": namespace}
    done = subprocess.run(
        [sys.executable, "-m", "tests.deploy.chart", CHART],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    if "refused" in answer:
        raise Refused(answer["refused"])
    manifests = {Path(path).name: text for path, text in answer["files"].items()}
    notes = manifests.pop("NOTES.txt")
    documents = [item for text in manifests.values() for item in yaml.safe_load_all(text) if item]
    complaints = tuple(item["error"] for item in answer["lint"]["messages"] if item["severity"] > 1)
    return Release(Rendered(tuple(documents)), notes, complaints)


def values_of(*files: str) -> Values:
    """The values of files of deploy/helm/values, by their names without .yaml."""
    return merged([yaml.safe_load((VALUES / f"{file}.yaml").read_text()) for file in files])


def merged(parts: Sequence[Values]) -> dict[str, Any]:
    """Maps merged key by key, as Helm merges several --values."""
    result: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            known = result.get(key)
            both = isinstance(value, Mapping) and isinstance(known, Mapping)
            result[key] = merged([known, value]) if both and known is not None else value
    return result


def main(chart: Path) -> None:
    import helm_python

    request = json.load(sys.stdin)
    values = request.pop("values")
    try:
        with helm_python.Chart.load(chart) as loaded:
            loaded.validate_schema(values)
            answer = {"files": loaded.render(values, **request), "lint": helm_python.lint(chart, values, strict=True)}
    except helm_python.HelmError as error:
        answer = {"refused": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
