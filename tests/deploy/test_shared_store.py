"""The network policy of docs/shared-store.md: Kubernetes accepts it, and it selects the pods of nodes."""

import re

import yaml

from tests.deploy.manifests import ROOT, Manifest, validate


def policy() -> Manifest:
    found = re.search(r"```yaml\n(.*?)```", (ROOT / "docs" / "shared-store.md").read_text(), re.S)
    assert found is not None
    loaded: Manifest = yaml.safe_load(found[1])
    return loaded


def test_kubernetes_accepts_the_policy() -> None:
    validate(policy())


def test_the_policy_is_for_the_pods_of_nodes() -> None:
    (expression,) = policy()["spec"]["podSelector"]["matchExpressions"]
    for role in expression["values"]:
        text = (ROOT / "deploy" / "kustomize" / "base" / f"{role}.yaml").read_text()
        assert f"{expression['key']}: {role}" in text
