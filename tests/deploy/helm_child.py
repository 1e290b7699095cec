"""Helm, in a process of its own, because it is a library with Go's runtime: answers each line of JSON with one.

A request has the chart's directory, values, and a release's name and namespace. The answer has the rendered files and
what helm lint finds, or why Helm refuses.
"""

import json
import sys
from typing import Any

import helm_python


def answer(chart: str, values: dict[str, Any], name: str, namespace: str) -> dict[str, Any]:
    try:
        with helm_python.Chart.load(chart) as loaded:
            loaded.validate_schema(values)
            files = loaded.render(values, name=name, namespace=namespace)
        return {"files": files, "lint": helm_python.lint(chart, values, strict=True)}
    except helm_python.HelmError as error:
        return {"refused": str(error)}


for line in sys.stdin:
    print(json.dumps(answer(**json.loads(line))), flush=True)
