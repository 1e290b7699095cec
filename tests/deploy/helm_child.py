"""Helm, in a process of its own, because it is a library with Go's runtime: answers each line of JSON with one.

A request has the chart's directory, values, and a release's name and namespace. The answer has the rendered files and
what helm lint finds, or why Helm refuses. With a kubeconfig, Helm installs the release there, or upgrades it.
"""

import json
import sys
from typing import Any

import helm_python

# Releases are kept in memory, by the cluster's kubeconfig.
clusters: dict[str, helm_python.Config] = {}


def answer(chart: str, values: dict[str, Any], name: str, namespace: str, kubeconfig: str | None) -> dict[str, Any]:
    try:
        if kubeconfig is not None:
            return apply(chart, values, name, namespace, kubeconfig)
        with helm_python.Chart.load(chart) as loaded:
            loaded.validate_schema(values)
            files = loaded.render(values, name=name, namespace=namespace)
        return {"files": files, "lint": helm_python.lint(chart, values, strict=True)}
    except helm_python.HelmError as error:
        return {"refused": str(error)}


def apply(chart: str, values: dict[str, Any], name: str, namespace: str, kubeconfig: str) -> dict[str, Any]:
    if kubeconfig not in clusters:
        clusters[kubeconfig] = helm_python.Config(
            kubeconfig_path=kubeconfig, namespace=namespace, storage_driver="memory"
        )
    cluster = clusters[kubeconfig]
    change = cluster.upgrade if any(each["name"] == name for each in cluster.list()) else cluster.install
    change(chart, name, values, namespace=namespace)
    return {}


for line in sys.stdin:
    print(json.dumps(answer(**json.loads(line))), flush=True)
