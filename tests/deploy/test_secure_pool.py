"""Pods of an InferencePool as processes, with all the protection that it allows: a proxy and clients are served, and
strangers with large bodies cannot take a gateway above its limit."""

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from google.protobuf.json_format import MessageToDict

from baton.cli.certs import certs
from baton.protos.ext_proc import external_processor_pb2 as pb
from baton.protos.ext_proc import external_processor_pb2_grpc
from tests.deploy.images import read_stages
from tests.deploy.manifests import BASE, KUSTOMIZE, ROLES, Manifest, render_with
from tests.deploy.pods import Pod, addresses
from tests.deploy.strangers import Door, send_large
from tests.deploy.test_manifests import mebibytes
from tests.deploy.test_pods import make_secrets

pytestmark = pytest.mark.slow

PICKER = "baton-picker.baton.svc"
STRANGERS = 16
DEADLINE_S = 600.0
# A connection may be closed while its answer is on the way, and a busy machine may not read a message in time.
REFUSALS = {"UNAUTHENTICATED", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "401", "closed"}


@dataclass(frozen=True)
class Pool:
    pods: dict[str, Pod]
    ca: Path
    key: str

    @property
    def door(self) -> Door:
        gateway = self.pods["gateway"]
        ports = gateway.rendered.ports("gateway")
        return Door(gateway.address, ports["grpc"], ports["http"])

    def complete(self, key: str) -> int:
        """The status that a client's short request gets."""
        body = {"model": "llama", "prompt": "The conductor", "max_tokens": 2}
        with closing(self.door.connect()) as connection:
            headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, dockerfile: Path) -> Iterator[Pool]:
    here = tmp_path_factory.mktemp("pool")
    for folder in ("overlay", "volumes", "logs"):
        (here / folder).mkdir()
    rendered = render_with(here / "overlay", BASE, KUSTOMIZE / "components" / "secure-inference-pool")
    stages = read_stages(dockerfile)
    address = addresses()
    by_role = {role: address() for role in (*ROLES, "picker")}
    secrets, key = make_secrets(here / "certs", by_role["gateway"])
    secrets["baton-picker-tls"] = here / "picker"
    certs(here / "of picker", [PICKER])
    (here / "picker").mkdir()
    for name in ("crt", "key"):
        shutil.copy(here / "of picker" / f"clients.{name}", here / "picker" / f"tls.{name}")
    services = {f"baton-{role}": by_role[role] for role in ROLES} | {"baton-gateway-headless": by_role["gateway"]}

    def pod(role: str) -> Pod:
        def volume(item: Manifest) -> Path:
            if "secret" in item:
                return secrets[item["secret"]["secretName"]]
            folder = here / "volumes" / f"{role}-{item['name']}"
            folder.mkdir(exist_ok=True)
            return folder

        return Pod(rendered, role, stages, by_role[role], services, volume, here / "logs")

    pods = {role: pod(role) for role in by_role}
    try:
        for each in pods.values():
            each.start()
        for each in pods.values():
            each.wait_until_it_passes("startupProbe")
            each.wait_until_it_passes("readinessProbe")
        yield Pool(pods, here / "of picker" / "ca.crt", key)
    finally:
        for each in pods.values():
            each.kill()


def test_a_key_is_needed_though_the_pool_speaks_plain_http(pool: Pool) -> None:
    assert pool.complete(pool.key) == 200
    assert pool.complete("baton-guessed") == 401


def test_a_proxy_checks_the_pickers_certificate_and_gets_a_gateway(pool: Pool) -> None:
    """The picker has read the gateway's metrics, or it would name none."""
    picker = pool.pods["picker"]
    asked = pb.ProcessingRequest(request_headers=pb.HttpHeaders(end_of_stream=True))
    credentials = grpc.ssl_channel_credentials(pool.ca.read_bytes())
    options = [("grpc.ssl_target_name_override", PICKER)]
    target = f"{picker.address}:{picker.rendered.ports('picker')['grpc']}"
    with grpc.secure_channel(target, credentials, options) as channel:
        stub = external_processor_pb2_grpc.ExternalProcessorStub(channel)
        (answer,) = stub.Process(iter([asked]), timeout=DEADLINE_S)
    named = f"{pool.door.host}:{pool.door.http_port}"
    assert MessageToDict(answer.dynamic_metadata) == {"envoy.lb": {"x-gateway-destination-endpoint": named}}


def test_strangers_with_large_bodies_cannot_take_a_gateway_above_its_limit(pool: Pool) -> None:
    """A client with a key is served at the same time, and so is a probe without one."""
    gateway, ended = pool.pods["gateway"], threading.Event()
    served: list[int] = []

    def go_on_asking() -> None:
        while not ended.is_set():
            served.append(pool.complete(pool.key))

    with ThreadPoolExecutor(1) as client:
        asking = client.submit(go_on_asking)
        try:
            outcomes = send_large(pool.door, STRANGERS)
        finally:
            ended.set()
        asking.result(DEADLINE_S)
    assert set(served) == {200}
    assert outcomes <= REFUSALS
    assert gateway.passes(gateway.container["livenessProbe"])
    assert gateway.peak_bytes() < mebibytes(gateway.container["resources"]["limits"]["memory"]) * 2**20
