"""An autoscaler that is added to pods that run keeps their number, with kubectl and with Helm."""

import os
import re
import shlex
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.chart import Helm, Values, values_of
from tests.deploy.kubernetes_api import KubernetesApi, serving
from tests.deploy.manifests import NVIDIA, OVERLAYS, ROLES, ROOT, Rendered

AUTOSCALED = OVERLAYS / "nvidia-autoscaled"
KUBECTL = Path(sysconfig.get_path("scripts")) / "kubectl"
# What somebody who watched the load has set by hand.
RUNNING = {"gateway": 3, "prefill": 4, "decode": 5}


@pytest.fixture
def server(scaled: Rendered, sets: Rendered) -> KubernetesApi:
    """A cluster that has every kind of object, and no object."""
    server = KubernetesApi([*scaled.objects, *sets.objects])
    server.objects.clear()
    return server


@pytest.fixture
def kubeconfig(server: KubernetesApi, tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "kubeconfig"
    with serving(server, file):
        yield file


def run(command: str, kubeconfig: Path) -> None:
    environment = {
        "PATH": os.pathsep.join([str(KUBECTL.parent), os.environ["PATH"]]),
        "HOME": str(kubeconfig.parent),
        "KUBECONFIG": str(kubeconfig),
    }
    done = subprocess.run(
        ["bash", "-euc", command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def apply(overlay: Path, kubeconfig: Path) -> None:
    run(f"kubectl apply --kustomize {shlex.quote(str(overlay))}", kubeconfig)


def scale_by_hand(server: KubernetesApi, kind: str = "Deployment", suffix: str = "") -> None:
    for role, count in RUNNING.items():
        if role == "gateway":
            server.find("Deployment", f"baton-{role}")["spec"]["replicas"] = count
        else:
            server.find(kind, f"baton-{role}{suffix}")["spec"]["replicas"] = count


def counts(server: KubernetesApi) -> dict[str, int | None]:
    """By role; None: the object has no count, so that Kubernetes sets 1."""
    return {role: server.find("Deployment", f"baton-{role}")["spec"].get("replicas") for role in ROLES}


def page() -> str:
    """The commands of the page that keep the count."""
    text = (ROOT / "docs" / "autoscaling.md").read_text()
    (block,) = re.findall(r"^```bash[^\n]*\n(.*?edit-last-applied.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return str(block)


def test_the_commands_of_the_page_keep_the_count_of_an_applied_overlay(server: KubernetesApi, kubeconfig: Path) -> None:
    apply(NVIDIA, kubeconfig)
    scale_by_hand(server)
    run(page().replace("my-cluster", "deploy/kustomize/overlays/nvidia-autoscaled"), kubeconfig)
    assert counts(server) == RUNNING
    assert server.find("HorizontalPodAutoscaler", "baton-decode")
    apply(AUTOSCALED, kubeconfig)
    assert counts(server) == RUNNING


def test_without_these_commands_kubectl_takes_the_count_away(server: KubernetesApi, kubeconfig: Path) -> None:
    apply(NVIDIA, kubeconfig)
    scale_by_hand(server)
    apply(AUTOSCALED, kubeconfig)
    assert set(counts(server).values()) == {None}


def test_the_chart_keeps_the_count_when_an_autoscaler_is_added(
    helm: Helm, server: KubernetesApi, kubeconfig: Path
) -> None:
    helm.apply(kubeconfig, values_of("nvidia"))
    assert counts(server) == dict.fromkeys(ROLES, 2)
    scale_by_hand(server)
    helm.apply(kubeconfig, values_of("nvidia", "autoscaled"))
    assert server.find("HorizontalPodAutoscaler", "baton-decode")
    assert counts(server) == RUNNING
    # What the autoscaler does afterwards stays, too.
    server.find("Deployment", "baton-decode")["spec"]["replicas"] = 7
    helm.apply(kubeconfig, values_of("nvidia", "autoscaled"))
    assert counts(server) == RUNNING | {"decode": 7}


def test_the_chart_keeps_the_count_of_sets(helm: Helm, server: KubernetesApi, kubeconfig: Path) -> None:
    values = values_of("nvidia", "leader-worker-set")
    helm.apply(kubeconfig, values)
    scale_by_hand(server, "LeaderWorkerSet", "-set")
    helm.apply(kubeconfig, values, values_of("autoscaled"))
    assert server.find("LeaderWorkerSet", "baton-decode-set")["spec"]["replicas"] == RUNNING["decode"]


def test_a_new_release_leaves_the_count_to_its_autoscalers(helm: Helm, server: KubernetesApi, kubeconfig: Path) -> None:
    keda: Values = {"autoscaling": {"by": "hpa"}, "podMonitor": {"enabled": True}}
    helm.apply(kubeconfig, {"insecure": True}, keda)
    assert set(counts(server).values()) == {None}
