"""The three files of `examples/kubernetes`: Kubernetes accepts them, and their pods serve a request."""

import json
import urllib.request
from pathlib import Path

import pytest
import yaml

from tests.deploy.images import read_stages
from tests.deploy.manifests import ROLES, ROOT, SETTINGS, Manifest, Rendered, validate
from tests.deploy.pods import Pod, addresses

FOLDER = ROOT / "examples" / "kubernetes"


@pytest.fixture(scope="module")
def rendered() -> Rendered:
    files = sorted(FOLDER.glob("*.yaml"))
    assert [file.stem for file in files] == sorted(ROLES)
    return Rendered(tuple(item for file in files for item in yaml.safe_load_all(file.read_text())))


def test_kubernetes_accepts_every_object(rendered: Rendered) -> None:
    for item in rendered.objects:
        validate(item)


@pytest.mark.parametrize("role", ROLES)
def test_every_variable_is_a_setting_of_its_role(rendered: Rendered, role: str) -> None:
    assert rendered.settings(role).keys() <= SETTINGS[role].model_fields.keys()


@pytest.mark.parametrize("role", ROLES)
def test_a_service_finds_the_roles_pods_at_their_ports(rendered: Rendered, role: str) -> None:
    service = rendered.find("Service", f"baton-{role}")["spec"]
    assert service["selector"] == rendered.deployment(role)["spec"]["template"]["metadata"]["labels"]
    assert {port["name"]: port["port"] for port in service["ports"]} == rendered.ports(role)


@pytest.mark.slow
def test_its_pods_serve_a_request(rendered: Rendered, dockerfile: Path, tmp_path: Path) -> None:
    stages = read_stages(dockerfile)
    address = addresses()
    by_role = {role: address() for role in ROLES}

    def pod(role: str) -> Pod:
        def volume(item: Manifest) -> Path:
            folder = tmp_path / f"{role}-{item['name']}"
            folder.mkdir(exist_ok=True)
            return folder

        services = {f"baton-{name}": at for name, at in by_role.items()}
        return Pod(rendered, role, stages, by_role[role], services, volume, tmp_path)

    pods = [pod(role) for role in ROLES]
    try:
        for each in pods:
            each.start()
        for each in pods:
            each.wait_until_it_passes("startupProbe")
            each.wait_until_it_passes("readinessProbe")
        request = urllib.request.Request(
            f"http://{by_role['gateway']}:8000/v1/completions",
            json.dumps({"prompt": "Return the", "max_tokens": 4, "ignore_eos": True}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
    finally:
        for each in pods:
            each.kill()
