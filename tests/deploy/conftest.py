"""Every kustomization, rendered once, and a Helm that renders the chart."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.chart import Helm, running_helm
from tests.deploy.manifests import BASE, CPU_DEMO, KUSTOMIZE, NVIDIA, OVERLAYS, Rendered, render, render_with


@pytest.fixture(scope="session")
def helm() -> Iterator[Helm]:
    with running_helm() as running:
        yield running


@pytest.fixture(scope="session")
def base() -> Rendered:
    return render(BASE)


@pytest.fixture(scope="session")
def cpu_demo() -> Rendered:
    return render(CPU_DEMO)


@pytest.fixture(scope="session")
def nvidia() -> Rendered:
    return render(NVIDIA)


@pytest.fixture(scope="session")
def rdma(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    """The NVIDIA overlay with the rdma component added."""
    return render_with(tmp_path_factory.mktemp("rdma"), NVIDIA, KUSTOMIZE / "components" / "rdma")


@pytest.fixture(scope="session")
def scaled() -> Rendered:
    return render(OVERLAYS / "nvidia-autoscaled")


@pytest.fixture(scope="session")
def sets() -> Rendered:
    return render(OVERLAYS / "nvidia-leader-worker-set")


@pytest.fixture(scope="session")
def several_hosts() -> Rendered:
    return render(OVERLAYS / "nvidia-several-hosts")


@pytest.fixture(scope="session")
def disaggregated() -> Rendered:
    return render(OVERLAYS / "nvidia-disaggregated-set")


@pytest.fixture(scope="session")
def pinned() -> Rendered:
    return render(OVERLAYS / "pinned-example")


@pytest.fixture(scope="session")
def keda(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    components = (KUSTOMIZE / "components" / name for name in ("pod-monitor", "keda"))
    return render_with(tmp_path_factory.mktemp("keda"), NVIDIA, *components)


@pytest.fixture(scope="session", params=["base", "cpu_demo", "nvidia", "rdma"])
def rendered(request: pytest.FixtureRequest) -> Rendered:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Rendered)
    return found


@pytest.fixture(scope="session")
def dockerfile() -> Path:
    return Path(__file__).resolve().parents[2] / "deploy" / "Dockerfile"
