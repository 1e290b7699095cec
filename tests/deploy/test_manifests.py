"""Rules for every kustomization: Kubernetes accepts it, and the processes accept its settings."""

import re

import kubernetes_validate
import pytest

from baton.kvcache.layout import parse_layout
from baton.protos.internal.v1 import decode_pb2, prefill_pb2
from baton.protos.v1 import generation_pb2
from baton.rpc.server import ListenAddress
from baton.settings.config import MIB, CommonSettings
from baton.settings.node_config import CPU_CACHE_MIB, NodeSettings
from baton.settings.topology import read_topology
from tests.deploy.manifests import NODE_ROLES, ROLE_LABEL, ROLES, SETTINGS, Manifest, Rendered

# The oldest release with `preStop.sleep` on by default, and the newest one with schemas at hand.
KUBERNETES = ("1.30", "1.37")
SERVICES = {
    "gateway": generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,
    "prefill": prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name,
    "decode": decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name,
}
# From the end of a drain to the end of the process: typed errors for requests that are left, closing, exit.
CLOSING_S = 10
HEALTH_PORT = 7003  # without TLS, since probes have no certificate


def labels_match(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_accepts_every_object(rendered: Rendered, version: str) -> None:
    for item in rendered.objects:
        kubernetes_validate.validate(item, version, strict=True)


def test_a_misspelt_field_would_not_be_accepted(base: Rendered) -> None:
    wrong = base.deployment("decode") | {"spec": base.deployment("decode")["spec"] | {"replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES[0], strict=True)


def test_every_object_is_in_the_namespace(rendered: Rendered) -> None:
    (namespace,) = rendered.of_kind("Namespace")
    others = [item for item in rendered.objects if item["kind"] not in {"Namespace", "PriorityClass"}]
    assert {item["metadata"]["namespace"] for item in others} == {namespace["metadata"]["name"]}


@pytest.mark.parametrize("role", ROLES)
def test_every_variable_is_a_setting_of_its_role(rendered: Rendered, role: str) -> None:
    assert set(rendered.settings(role)) <= set(SETTINGS[role].model_fields)


@pytest.mark.parametrize("role", ROLES)
def test_the_process_accepts_every_value(rendered: Rendered, role: str) -> None:
    given = rendered.settings(role)
    settings = SETTINGS[role].model_validate(given)
    assert isinstance(settings, CommonSettings)
    ListenAddress.parse(given["advertise"], field="advertise")
    ListenAddress.parse(given["listen"], field="listen")


@pytest.mark.parametrize("role", NODE_ROLES)
def test_the_layout_is_valid_for_every_model(rendered: Rendered, role: str) -> None:
    for mla in (False, True):
        parse_layout(rendered.settings(role).get("kv_cache_layout", "NHD"), mla=mla)


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_advertises_its_own_address(rendered: Rendered, role: str) -> None:
    port = rendered.ports(role)["grpc"]
    given = rendered.settings(role)
    assert given["advertise"] == f"10.0.0.7:{port}"
    assert given["listen"] == f"[::]:{port}"


def test_gateways_alone_speak_http_too(rendered: Rendered) -> None:
    assert {role: list(rendered.ports(role)) for role in ROLES} == {
        "gateway": ["grpc", "http"],
        "prefill": ["grpc"],
        "decode": ["grpc"],
    }
    assert rendered.settings("gateway")["http_listen"] == f"[::]:{rendered.ports('gateway')['http']}"


@pytest.mark.parametrize("role", NODE_ROLES)
def test_gateways_find_every_node_by_a_headless_service(rendered: Rendered, role: str) -> None:
    name, _, port = rendered.settings("gateway")[role].partition(":")
    service = rendered.find("Service", name)["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert [item["port"] for item in service["ports"]] == [int(port)]
    assert labels_match(service["selector"], rendered.deployment(role)["spec"]["template"]["metadata"]["labels"])


def test_clients_may_balance_or_not(rendered: Rendered) -> None:
    services = [
        item["spec"] for item in rendered.of_kind("Service") if item["spec"]["selector"][ROLE_LABEL] == "gateway"
    ]
    assert sorted(service.get("clusterIP", "one address") for service in services) == ["None", "one address"]


def test_a_services_ports_are_its_containers_and_name_their_protocol(rendered: Rendered) -> None:
    has_tls = "tls_cert" in rendered.settings("gateway")
    protocols = {"grpc": "https" if has_tls else "kubernetes.io/h2c", "http": "https" if has_tls else "http"}
    for service in rendered.of_kind("Service"):
        ports = service["spec"]["ports"]
        assert {port["targetPort"]: port["port"] for port in ports} == rendered.ports(
            service["spec"]["selector"][ROLE_LABEL]
        )
        assert all(port["appProtocol"] == protocols[port["targetPort"]] for port in ports)


@pytest.mark.parametrize("role", ROLES)
def test_all_objects_of_a_role_select_its_pods_and_no_others(rendered: Rendered, role: str) -> None:
    name = f"baton-{role}"
    deployment = rendered.deployment(role)["spec"]
    selectors = [
        deployment["selector"]["matchLabels"],
        rendered.find("PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"],
        rendered.find("NetworkPolicy", name)["spec"]["podSelector"]["matchLabels"],
        *(item["labelSelector"]["matchLabels"] for item in deployment["template"]["spec"]["topologySpreadConstraints"]),
    ]
    for other in ROLES:
        labels = rendered.deployment(other)["spec"]["template"]["metadata"]["labels"]
        assert [labels_match(selector, labels) for selector in selectors] == [other == role] * len(selectors)


@pytest.mark.parametrize("role", ROLES)
def test_live_is_the_empty_service_and_ready_the_roles_own(rendered: Rendered, role: str) -> None:
    container = rendered.container(role)
    live = {"port": HEALTH_PORT}
    assert rendered.settings(role)["health_listen"] == f"[::]:{HEALTH_PORT}"
    # A node is live from its start on, and while it captures graphs it may not answer for seconds.
    assert container["startupProbe"]["grpc"] == (live if role == "gateway" else live | {"service": SERVICES[role]})
    assert container["livenessProbe"]["grpc"] == live
    assert container["readinessProbe"]["grpc"] == live | {"service": SERVICES[role]}


@pytest.mark.parametrize("role", ROLES)
def test_a_drain_ends_before_the_pod_is_killed(rendered: Rendered, role: str) -> None:
    pod = rendered.pod(role)
    before_s = rendered.container(role).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    drain_s = float(rendered.settings(role)["drain_grace_s"])
    assert pod["terminationGracePeriodSeconds"] >= before_s + drain_s + CLOSING_S


def test_a_gateway_stays_as_long_as_its_decode_nodes(rendered: Rendered) -> None:
    gateway, decode = (float(rendered.settings(role)["drain_grace_s"]) for role in ("gateway", "decode"))
    assert gateway >= decode


def test_only_stateless_pods_end_before_their_successor_is_ready(rendered: Rendered) -> None:
    updates = {role: rendered.deployment(role)["spec"]["strategy"]["rollingUpdate"] for role in ROLES}
    surge_first = {"maxSurge": 1, "maxUnavailable": 0}
    in_place = {"maxSurge": 0, "maxUnavailable": 1}
    assert updates == {"gateway": surge_first, "decode": surge_first, "prefill": in_place}


def test_pods_meet_the_restricted_profile(rendered: Rendered) -> None:
    (namespace,) = rendered.of_kind("Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for role, pod in rendered.pods():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["runAsGroup"] == 65532
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert rendered.container(role)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)


def test_pods_get_no_token_and_no_variables_of_services(rendered: Rendered) -> None:
    for role, pod in rendered.pods():
        account = rendered.find("ServiceAccount", pod["serviceAccountName"])
        assert account["metadata"]["labels"][ROLE_LABEL] == role
        assert account["automountServiceAccountToken"] is False
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False


@pytest.mark.parametrize("role", NODE_ROLES)
def test_shared_memory_is_memory_and_fits_the_limit(rendered: Rendered, role: str) -> None:
    volumes = {volume["name"]: volume for volume in rendered.pod(role)["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in rendered.container(role)["volumeMounts"]}
    shm = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert shm["medium"] == "Memory"
    assert mebibytes(shm["sizeLimit"]) < mebibytes(rendered.container(role)["resources"]["limits"]["memory"])
    assert "emptyDir" in volumes[mounts["/tmp"]]


@pytest.mark.parametrize("role", NODE_ROLES)
def test_a_cache_in_main_memory_leaves_room_for_the_rest(rendered: Rendered, role: str) -> None:
    given = rendered.settings(role)
    settings = SETTINGS[role].model_validate(given)
    assert isinstance(settings, NodeSettings)
    resources = rendered.container(role)["resources"]
    on_gpu = given.get("device") == "cuda"
    cache_bytes = 0 if on_gpu else settings.kv_cache_bytes or CPU_CACHE_MIB * MIB
    staging_bytes = settings.staging_bytes(on_gpu=on_gpu)
    assert cache_bytes + staging_bytes < 0.5 * MIB * mebibytes(resources["limits"]["memory"])
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


def test_a_changed_setting_rolls_the_pods_that_read_it(base: Rendered, cpu_demo: Rendered) -> None:
    maps = [
        {source["configMapRef"]["name"] for source in rendered.container("decode")["envFrom"]}
        for rendered in (base, cpu_demo)
    ]
    assert not maps[0] & maps[1]
    assert all(re.fullmatch(r"baton(-decode)?-[0-9a-z]{10}", name) for name in maps[0] | maps[1])


def test_a_node_is_reached_by_gateways_and_peers_alone(rendered: Rendered) -> None:
    assert allowed_into(rendered, "prefill") == {("gateway", 7001, 7001), ("decode", 20000, 20999)}
    assert allowed_into(rendered, "decode") == {
        ("gateway", 7002, 7002),
        ("prefill", 7002, 7002),
        ("prefill", 20000, 20999),
    }
    assert allowed_into(rendered, "gateway") == {("*", 7000, 7000), ("*", 8000, 8000)}


def test_a_role_that_may_be_reached_may_be_called(rendered: Rendered) -> None:
    for role in NODE_ROLES:
        for source, first, last in allowed_into(rendered, role):
            assert (role, first, last) in allowed_out_of(rendered, source)


@pytest.mark.parametrize("role", NODE_ROLES)
def test_ucx_listens_where_the_policy_lets_peers_in(rendered: Rendered, role: str) -> None:
    first, last = map(int, rendered.environment(role)["UCX_TCP_PORT_RANGE"].split("-"))
    peer = "decode" if role == "prefill" else "prefill"
    assert (peer, first, last) in allowed_into(rendered, role)


@pytest.mark.parametrize("role", NODE_ROLES)
def test_nodes_report_the_zone_and_the_host_of_their_pod(rendered: Rendered, role: str) -> None:
    container = rendered.container(role)
    for zone, labels in (("eu-1a", ("zone=eu-1a", "host=gpu-7")), ("", ("host=gpu-7",))):
        fields = {"metadata.labels['topology.kubernetes.io/zone']": zone, "spec.nodeName": "gpu-7"}
        given = rendered.environment_of(container, fields)["BATON_TOPOLOGY"]
        assert read_topology(given) == labels


def allowed_into(rendered: Rendered, role: str) -> set[tuple[str, int, int]]:
    """The roles that may connect to the role's ports: (role or *, first port, last port)."""
    policy = rendered.find("NetworkPolicy", f"baton-{role}")["spec"]
    assert "Ingress" in policy["policyTypes"]
    return _edges(policy["ingress"], "from")


def allowed_out_of(rendered: Rendered, role: str) -> set[tuple[str, int, int]]:
    policy = rendered.find("NetworkPolicy", f"baton-{role}")["spec"]
    assert "Egress" in policy["policyTypes"]
    return _edges(policy["egress"], "to")


def _edges(rules: list[Manifest], side: str) -> set[tuple[str, int, int]]:
    return {
        (peer, port["port"], port.get("endPort", port["port"]))
        for rule in rules
        for peer in [item["podSelector"]["matchLabels"][ROLE_LABEL] for item in rule.get(side, ())] or ["*"]
        for port in rule["ports"]
    }


def mebibytes(quantity: str) -> float:
    """Reads the two units that our manifests use."""
    units = {"Mi": 1, "Gi": 1024}
    return float(quantity[:-2]) * units[quantity[-2:]]


def test_a_default_is_not_repeated(base: Rendered) -> None:
    for role in ROLES:
        fields = SETTINGS[role].model_fields
        parsed = SETTINGS[role].model_validate(base.settings(role)).model_dump()
        assert [name for name in base.settings(role) if parsed[name] == fields[name].default] == []
