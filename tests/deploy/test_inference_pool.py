"""An InferencePool of the gateways, with the picker: the objects fit each other and the processes."""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from baton.gateway.picker.process import LIVENESS, READINESS
from baton.settings.gateway_config import PickerSettings
from tests.deploy.manifests import CPU_DEMO, KUSTOMIZE, Rendered, render

SCHEMAS = Path(__file__).parent / "schemas"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    here = tmp_path_factory.mktemp("pool").resolve()
    component = os.path.relpath(KUSTOMIZE / "components" / "inference-pool", here)
    (here / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nnamespace: baton\n"
        f"resources: [{os.path.relpath(CPU_DEMO, here)}]\ncomponents: [{component}]\n"
    )
    return render(here)


def container(pool: Rendered) -> dict[str, Any]:
    (found,) = pool.deployment("picker")["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def settings(pool: Rendered) -> PickerSettings:
    (source,) = container(pool)["envFrom"]
    given = pool.find("ConfigMap", source["configMapRef"]["name"])["data"]
    return PickerSettings.model_validate({name.removeprefix("BATON_").lower(): text for name, text in given.items()})


def test_every_object_fits_its_schema(pool: Rendered) -> None:
    for item in pool.objects:
        schema = SCHEMAS / f"{item['kind']}.json"
        if schema.is_file():
            jsonschema.validate(item, json.loads(schema.read_text()))
        else:
            kubernetes_validate.validate(item, "1.37", strict=True)


@pytest.mark.parametrize("kind", ["InferencePool", "HTTPRoute"])
def test_a_misspelt_field_would_not_be_accepted(pool: Rendered, kind: str) -> None:
    item = pool.find(kind, "baton")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            item | {"spec": item["spec"] | {"selectors": {}}}, json.loads((SCHEMAS / f"{kind}.json").read_text())
        )


def test_the_pool_has_the_gateways_and_where_they_serve_http(pool: Rendered) -> None:
    spec = pool.find("InferencePool", "baton")["spec"]
    labels = pool.deployment("gateway")["spec"]["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert [port["number"] for port in spec["targetPorts"]] == [pool.ports("gateway")["http"]]


def test_the_picker_finds_the_pods_of_the_pool_at_the_pools_port(pool: Rendered) -> None:
    name, _, port = settings(pool).pool.partition(":")
    service = pool.find("Service", name)["spec"]
    assert service["clusterIP"] == "None"
    assert int(port) == pool.find("InferencePool", "baton")["spec"]["targetPorts"][0]["number"]


def test_the_pool_and_the_route_name_the_picker_and_the_pool(pool: Rendered) -> None:
    reference = pool.find("InferencePool", "baton")["spec"]["endpointPickerRef"]
    service = pool.find("Service", reference["name"])["spec"]
    labels = pool.deployment("picker")["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert [port["port"] for port in service["ports"]] == [reference["port"]["number"]]
    (rule,) = pool.find("HTTPRoute", "baton")["spec"]["rules"]
    assert rule["backendRefs"] == [{"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "baton"}]


def test_the_picker_listens_where_it_is_asked(pool: Rendered) -> None:
    found, given = container(pool), settings(pool)
    ports = {port["name"]: port["containerPort"] for port in found["ports"]}
    assert given.listen == f"[::]:{ports['grpc']}"
    health = int(given.health_listen.rpartition(":")[2])
    assert found["startupProbe"]["grpc"] == {"port": health, "service": LIVENESS}
    assert found["livenessProbe"]["grpc"] == {"port": health, "service": LIVENESS}
    assert found["readinessProbe"]["grpc"] == {"port": health, "service": READINESS}
    assert found["command"][:2] == ["python", "-m"]
    assert find_spec(f"{found['command'][2]}.__main__") is not None


def test_the_picker_may_reach_the_gateways_only_and_gets_no_token(pool: Rendered) -> None:
    policy = pool.find("NetworkPolicy", "baton-picker")["spec"]
    gateways, dns = policy["egress"]
    assert [port["port"] for port in gateways["ports"]] == [pool.ports("gateway")["http"]]
    assert {port["port"] for port in dns["ports"]} == {53, 5353}
    pod = pool.deployment("picker")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["terminationGracePeriodSeconds"] >= 10 + settings(pool).drain_grace_s + 10
