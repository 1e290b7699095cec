"""Renders the Helm chart, as `helm template` does."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.manifests import ROOT, Rendered

CHART = ROOT / "deploy" / "helm" / "baton"
VALUES = ROOT / "deploy" / "helm" / "values"
_CHILD = Path(__file__).parent / "helm_child.py"

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Release:
    """What Helm makes of some values."""

    rendered: Rendered
    # Objects that Helm makes at certain times only, such as the pod of `helm test`.
    hooks: Rendered
    notes: str
    # Of helm lint: messages of warnings and errors.
    complaints: tuple[str, ...]


class Refused(Exception):
    """Helm refuses the values; the message is Helm's."""


@dataclass(frozen=True)
class Helm:
    """A running Helm."""

    _child: "subprocess.Popen[str]"

    def release(self, *values: Values, name: str = "baton", namespace: str = "baton") -> Release:
        """Renders and lints the chart with values; later ones win.

        Raises:
            Refused: by the chart's schema, or by a template.
        """
        answer = self._ask(values, name, namespace, None)
        manifests = {Path(path).name: text for path, text in answer["files"].items()}
        notes = manifests.pop("NOTES.txt")
        objects = [item for text in manifests.values() for item in yaml.load_all(text, Loader=yaml.CSafeLoader) if item]
        hooks = tuple(item for item in objects if "helm.sh/hook" in item["metadata"].get("annotations", {}))
        applied = tuple(item for item in objects if item not in hooks)
        complaints = tuple(item["error"] for item in answer["lint"]["messages"] if item["severity"] > 1)
        return Release(Rendered(applied), Rendered(hooks), notes, complaints)

    def apply(self, kubeconfig: Path, *values: Values, name: str = "baton", namespace: str = "baton") -> None:
        """Installs the release in a cluster, or upgrades it.

        Raises:
            Refused: by the chart, or by the cluster.
        """
        self._ask(values, name, namespace, kubeconfig)

    def _ask(self, values: Sequence[Values], name: str, namespace: str, kubeconfig: Path | None) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        request = {
            "chart": str(CHART),
            "values": merged(values),
            "name": name,
            "namespace": namespace,
            "kubeconfig": kubeconfig and str(kubeconfig),
        }
        self._child.stdin.write(json.dumps(request) + "\n")
        self._child.stdin.flush()
        answer: dict[str, Any] = json.loads(self._child.stdout.readline())
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer


@contextmanager
def running_helm() -> Iterator[Helm]:
    with subprocess.Popen(
        [sys.executable, _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:  # its end closes the pipes, which ends the child
        yield Helm(child)


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
