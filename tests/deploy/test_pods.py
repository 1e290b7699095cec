"""The manifests' pods as processes: one cluster with TLS, keys, metrics, a picker, a model from a volume; its drain."""

import http.client
import io
import json
import shutil
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from google.protobuf.json_format import MessageToDict

from baton.cli.certs import certs, key
from baton.protos.ext_proc import external_processor_pb2 as pb
from baton.protos.ext_proc import external_processor_pb2_grpc
from baton.settings.config import DEMO_MODELS
from tests.deploy.chart import running_helm
from tests.deploy.images import read_stages
from tests.deploy.manifests import BASE, KUSTOMIZE, ROLES, Manifest, Rendered, render_with
from tests.deploy.pods import Pod, addresses
from tests.deploy.test_manifests import mebibytes

pytestmark = pytest.mark.slow

COMPONENTS = ("model-volume", "model-download", "tls", "pod-monitor", "inference-pool")
PODS = (*ROLES, "picker")
SERVER = "baton-gateway.baton.svc"  # how clients in the cluster call the service
RESPONSE_S = 600.0


@dataclass(frozen=True)
class Cluster:
    pods: dict[str, Pod]
    certificates: Path
    key: str

    @contextmanager
    def completion(self, key: str, **fields: object) -> Iterator[http.client.HTTPResponse]:
        """Asks the gateway's HTTP port by the service's name, which its certificate must have."""
        port = self.pods["gateway"].rendered.ports("gateway")["http"]
        context = ssl.create_default_context(cafile=self.certificates / "ca.crt")
        plain = socket.create_connection((self.pods["gateway"].address, port), RESPONSE_S)
        connection = http.client.HTTPSConnection(SERVER, port, context=context)
        connection.sock = context.wrap_socket(plain, server_hostname=SERVER)
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        with closing(connection):
            connection.request("POST", "/v1/completions", json.dumps({"prompt": "The conductor", **fields}), headers)
            yield connection.getresponse()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, dockerfile: Path) -> Iterator[Cluster]:
    """A pod of each role and a picker, ready."""
    here = tmp_path_factory.mktemp("pods")
    for folder in ("overlay", "volumes", "logs"):
        (here / folder).mkdir()
    rendered = render_with(here / "overlay", BASE, *(KUSTOMIZE / "components" / name for name in COMPONENTS))
    stages = read_stages(dockerfile)
    address = addresses()
    by_role = {role: address() for role in PODS}
    secrets, made = make_secrets(here / "certs", by_role["gateway"])
    services = {f"baton-{role}": by_role[role] for role in ROLES} | {"baton-gateway-headless": by_role["gateway"]}
    # Where the gateways' HTTP port has TLS, as docs/discovery.md says.
    picker = rendered.container("picker")["envFrom"][0]["configMapRef"]["name"]
    rendered.find("ConfigMap", picker)["data"]["BATON_POOL_METRICS_PORT"] = "9400"

    def pod(role: str) -> Pod:
        def volume(item: Manifest) -> Path:
            if "secret" in item:
                return secrets[item["secret"]["secretName"]]
            shared = "persistentVolumeClaim" in item
            folder = here / "volumes" / (item["name"] if shared else f"{role}-{item['name']}")
            folder.mkdir(exist_ok=True)
            return folder

        return Pod(rendered, role, stages, by_role[role], services, volume, here / "logs")

    put_model(rendered, here / "volumes" / "model")
    pods = {role: pod(role) for role in PODS}
    try:
        for each in pods.values():
            each.start()
        for each in pods.values():
            each.wait_until_it_passes("startupProbe")
            each.wait_until_it_passes("readinessProbe")
        yield Cluster(pods, here / "certs", made)
    finally:
        for each in pods.values():
            each.kill()


def make_secrets(folder: Path, gateway: str) -> tuple[dict[str, Path], str]:
    """The secrets of deploy/README.md, each a directory, and a client's key."""
    with redirect_stdout(io.StringIO()) as printed:
        certs(folder, [SERVER, gateway])
        printed.truncate(printed.seek(0))
        key("client", folder / "keys.toml")
    own = {role: {"tls.crt": f"{role}.crt", "tls.key": f"{role}.key", "ca.crt": "ca.crt"} for role in ROLES}
    files = {f"baton-{role}-tls": content for role, content in own.items()}
    files["baton-client-tls"] = {"tls.crt": "clients.crt", "tls.key": "clients.key"}
    files["baton-api-keys"] = {"keys.toml": "keys.toml"}
    for secret, content in files.items():
        (folder / secret).mkdir()
        for name, source in content.items():
            shutil.copy(folder / source, folder / secret / name)
    return {secret: folder / secret for secret in files}, printed.getvalue().strip()


def put_model(rendered: Rendered, volume: Path) -> None:
    """What the download's Job leaves in the volume."""
    model = volume / Path(rendered.settings("gateway")["model"]).relative_to("/models")
    shutil.copytree(DEMO_MODELS / "llama", model)
    given = {
        item["name"]: item.get("value") for item in rendered.job()["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    (model / ".baton-source").write_text(f"{given['MODEL_REPOSITORY']}@{given['MODEL_REVISION']}\n")


def test_pods_pass_their_probes(cluster: Cluster) -> None:
    for pod in cluster.pods.values():
        assert pod.passes(pod.container["livenessProbe"])
        assert pod.passes(pod.container["readinessProbe"])


def test_a_client_with_a_key_gets_an_answer_and_one_without_does_not(cluster: Cluster) -> None:
    with cluster.completion(cluster.key, model="Qwen3-8B", max_tokens=4, ignore_eos=True) as answer:
        assert (answer.status, json.loads(answer.read())["usage"]["completion_tokens"]) == (200, 4)
    with cluster.completion("baton-guessed", model="Qwen3-8B") as answer:
        assert answer.status == 401


def test_every_pod_serves_metrics_where_prometheus_scrapes(cluster: Cluster) -> None:
    (endpoint,) = cluster.pods["gateway"].rendered.find("PodMonitor", "baton")["spec"]["podMetricsEndpoints"]
    for role, pod in cluster.pods.items():
        port = pod.rendered.ports(role)[endpoint["port"]]
        with urllib.request.urlopen(f"http://{pod.address}:{port}{endpoint['path']}", timeout=RESPONSE_S) as scraped:
            assert f'role="{role}"' in scraped.read().decode()


def test_the_picker_names_the_gateway(cluster: Cluster) -> None:
    picker = cluster.pods["picker"]
    asked = pb.ProcessingRequest(request_headers=pb.HttpHeaders(end_of_stream=True))
    with grpc.insecure_channel(f"{picker.address}:{picker.rendered.ports('picker')['grpc']}") as channel:
        (answer,) = external_processor_pb2_grpc.ExternalProcessorStub(channel).Process(
            iter([asked]), timeout=RESPONSE_S
        )
    gateway = cluster.pods["gateway"]
    named = f"{gateway.address}:{gateway.rendered.ports('gateway')['http']}"
    assert MessageToDict(answer.dynamic_metadata) == {"envoy.lb": {"x-gateway-destination-endpoint": named}}


def test_pods_stay_below_their_memory_limits(cluster: Cluster) -> None:
    for pod in cluster.pods.values():
        assert pod.peak_bytes() < mebibytes(pod.container["resources"]["limits"]["memory"]) * 2**20


def run_helm_test(cluster: Cluster, key_folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the pod that `helm test` makes."""
    with running_helm() as helm:
        (pod,) = helm.release().hooks.objects
    (container,) = pod["spec"]["containers"]
    folders = {"/etc/baton/ca": cluster.certificates / "baton-gateway-tls", "/etc/baton/key": key_folder}
    assert folders.keys() <= {mount["mountPath"] for mount in container["volumeMounts"]}
    command = [word.replace(SERVER, cluster.pods["gateway"].address) for word in container["command"]]
    for path, folder in folders.items():
        command = [word.replace(path, str(folder)) for word in command]
    program, *arguments = command
    assert program == "baton"
    return subprocess.run(
        [sys.executable, "-m", program, *arguments], capture_output=True, text=True, timeout=RESPONSE_S, check=False
    )


def test_the_pod_of_helm_test_gets_an_answer_with_a_key_and_says_what_is_wrong_without(
    cluster: Cluster, tmp_path: Path
) -> None:
    without = run_helm_test(cluster, tmp_path)
    assert without.returncode != 0
    assert "the key cannot be read" in without.stderr
    (tmp_path / "key").write_text("no-key-of-this-cluster\n")
    refused = run_helm_test(cluster, tmp_path)
    assert refused.returncode != 0
    (tmp_path / "key").write_text(f"{cluster.key}\n")
    done = run_helm_test(cluster, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_pod_that_ends_finishes_its_streams_within_its_grace_period(cluster: Cluster) -> None:
    wanted = {"model": "Qwen3-8B", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with cluster.completion(cluster.key, **wanted) as answer:
        first = answer.readline()
        for role in ("picker", "gateway", "decode", "prefill"):
            cluster.pods[role].terminate()
        events = [first, *answer]
    assert [line for line in events if line.strip()][-1].strip() == b"data: [DONE]"
    assert sum(b'"text"' in line for line in events) > 1
    assert {role: cluster.pods[role].wait_for_its_end() for role in PODS} == dict.fromkeys(PODS, 0)
