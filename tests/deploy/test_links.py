"""What carries KV between pods: NVLink within a host and between hosts, RDMA, and a floor and an alert for the rest."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from baton.settings.node_config import NodeSettings
from tests.deploy.chart import Helm, Refused, Values, values_of
from tests.deploy.manifests import (
    KUSTOMIZE,
    NODE_ROLES,
    NVIDIA,
    ROLE_LABEL,
    SETTINGS,
    Manifest,
    Rendered,
    render_with,
    validate,
)

PORTS = {"decode": {7002, 7003, 9400}, "prefill": {7001, 7005, 9401}}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    components = (KUSTOMIZE / "components" / name for name in ("pod-monitor", "nvlink-pair"))
    return render_with(tmp_path_factory.mktemp("pair"), NVIDIA, *components)


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    components = (KUSTOMIZE / "components" / name for name in ("arm64", "compute-domain"))
    return render_with(tmp_path_factory.mktemp("rack"), NVIDIA, *components)


def by_name(items: list[Manifest]) -> Mapping[str, Manifest]:
    return {item["name"]: item for item in items}


@pytest.mark.parametrize(("component", "kind"), [("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")])
def test_a_pair_has_one_autoscaler(tmp_path: Path, component: str, kind: str) -> None:
    components = (KUSTOMIZE / "components" / name for name in ("pod-monitor", component, "nvlink-pair"))
    scaled = {
        item["spec"]["scaleTargetRef"]["name"] for item in render_with(tmp_path, NVIDIA, *components).of_kind(kind)
    }
    assert scaled == {"baton-gateway", "baton-decode"}


def test_a_pair_shares_all_that_cuda_ipc_needs(pair: Rendered) -> None:
    pod = pair.pod("decode")
    containers = by_name(pod["containers"])
    assert set(containers) == set(NODE_ROLES)
    # Containers of a pod share its IPC namespace, and with this its process namespace.
    assert pod["shareProcessNamespace"] is True
    (claim,) = pod["resourceClaims"]
    (request,) = pair.find("ResourceClaimTemplate", claim["resourceClaimTemplateName"])["spec"]["spec"]["devices"][
        "requests"
    ]
    assert request["exactly"] == {"deviceClassName": "gpu.nvidia.com", "count": 2}
    for container in containers.values():
        # Both see both GPUs: a GPU of a device plugin is seen by its own container alone.
        assert container["resources"]["claims"] == [{"name": claim["name"]}]
        assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert not {"hostIPC", "hostPID", "hostNetwork"} & set(pod)


def test_the_nodes_of_a_pair_differ_in_gpu_name_and_ports(pair: Rendered) -> None:
    fields = {"status.podIP": "10.0.0.7", "metadata.name": "the-pod"}
    containers = by_name(pair.pod("decode")["containers"])
    given = {role: pair.environment_of(containers[role], fields) for role in NODE_ROLES}
    for name in ("BATON_DEVICE", "BATON_NAME", "BATON_ADVERTISE", "BATON_HEALTH_LISTEN", "BATON_METRICS_LISTEN"):
        assert given["prefill"][name] != given["decode"][name]
    for role in NODE_ROLES:
        environment = given[role]
        names = ("BATON_LISTEN", "BATON_HEALTH_LISTEN", "BATON_METRICS_LISTEN")
        assert {int(environment[name].rpartition(":")[2]) for name in names} == PORTS[role]
        probes = {
            containers[role][probe]["grpc"]["port"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")
        }
        assert probes == PORTS[role] & {7003, 7005}
        settings = {name[6:].lower(): value for name, value in environment.items() if name.startswith("BATON_")}
        assert isinstance(SETTINGS[role].model_validate(settings), NodeSettings)
        mounts = {item["mountPath"]: item["name"] for item in containers[role]["volumeMounts"]}
        volumes = by_name(pair.pod("decode")["volumes"])
        assert volumes[mounts["/etc/baton/tls"]]["secret"]["secretName"] == f"baton-{role}-tls"
        assert mounts["/dev/shm"] == "shm"


def test_names_of_a_pairs_ports_are_unique_and_services_use_them(pair: Rendered) -> None:
    ports = {port["name"]: port["containerPort"] for each in pair.pod("decode")["containers"] for port in each["ports"]}
    assert ports == {"grpc": 7002, "metrics": 9400, "grpc-prefill": 7001, "metrics-prefill": 9401}
    labels = pair.deployment("decode")["spec"]["template"]["metadata"]["labels"]
    for role in NODE_ROLES:
        service = pair.find("Service", f"baton-{role}")["spec"]
        assert service["selector"].items() <= labels.items()
        assert [ports[item["targetPort"]] for item in service["ports"]] == [item["port"] for item in service["ports"]]
    endpoints = pair.find("PodMonitor", "baton")["spec"]["podMetricsEndpoints"]
    assert {item["port"] for item in endpoints} == {"metrics", "metrics-prefill"}


def test_policies_let_gateways_and_other_pairs_reach_both_nodes(pair: Rendered) -> None:
    assert [item["metadata"]["name"] for item in pair.of_kind("Deployment")] == ["baton-decode", "baton-gateway"]
    for kind in ("NetworkPolicy", "PodDisruptionBudget", "ServiceAccount"):
        assert "baton-prefill" not in {item["metadata"]["name"] for item in pair.of_kind(kind)}
    policy = pair.find("NetworkPolicy", "baton-decode")["spec"]
    into = allowed(policy["ingress"], "from")
    assert into == {
        ("gateway", 7001),
        ("gateway", 7002),
        ("decode", 7002),
        ("decode", 20000),
    }
    assert {edge for edge in into if edge[0] == "decode"} == allowed(policy["egress"], "to")
    out = allowed(pair.find("NetworkPolicy", "baton-gateway")["spec"]["egress"], "to")
    assert {("decode", 7001), ("decode", 7002)} <= out
    (rule,) = pair.find("NetworkPolicy", "baton-metrics")["spec"]["ingress"]
    assert {port["port"] for port in rule["ports"]} == {9400, 9401}


def allowed(rules: list[Manifest], side: str) -> set[tuple[str, int]]:
    return {
        (peer["podSelector"]["matchLabels"][ROLE_LABEL], port["port"])
        for rule in rules
        for peer in rule.get(side, ())
        for port in rule["ports"]
    }


@pytest.mark.parametrize("name", ["pair", "rack"])
def test_every_object_fits_its_schema(request: pytest.FixtureRequest, name: str) -> None:
    for item in request.getfixturevalue(name).objects:
        validate(item)


def test_a_pair_of_larger_nodes_has_a_gpu_for_each_rank(helm: Helm) -> None:
    values: Values = {
        "nvlinkPair": {"enabled": True},
        "prefill": {"settings": {"BATON_TENSOR_PARALLEL_SIZE": 2}},
        "decode": {"settings": {"BATON_TENSOR_PARALLEL_SIZE": 4}},
    }
    found = helm.release(values_of("nvidia"), values).rendered
    (template,) = found.of_kind("ResourceClaimTemplate")
    assert template["spec"]["spec"]["devices"]["requests"][0]["exactly"]["count"] == 6
    containers = by_name(found.pod("decode")["containers"])
    devices = {
        role: {item["name"]: item.get("value") for item in containers[role]["env"]}["BATON_DEVICE"]
        for role in NODE_ROLES
    }
    assert devices == {"prefill": "cuda:0", "decode": "cuda:2"}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"node": {"kind": "LeaderWorkerSet"}}, "nvlinkPair.enabled needs node.kind Deployment"),
        (
            {"autoscaling": {"by": "hpa"}, "podMonitor": {"enabled": True}},
            "nvlinkPair.enabled needs autoscaling.by to be empty",
        ),
    ],
)
def test_a_pair_refuses_what_would_part_it(helm: Helm, values: Values, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        helm.release(values_of("nvidia"), {"nvlinkPair": {"enabled": True}}, values)


def test_nodes_of_a_rack_have_a_channel_of_one_domain_and_stay_in_one_partition(rack: Rendered) -> None:
    domain = rack.find("ComputeDomain", "baton")["spec"]
    template = domain["channel"]["resourceClaimTemplate"]["name"]
    for role in NODE_ROLES:
        pod = rack.pod(role)
        (claim,) = pod["resourceClaims"]
        assert claim["resourceClaimTemplateName"] == template
        assert rack.container(role)["resources"]["claims"] == [{"name": claim["name"]}]
        (term,) = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "nvidia.com/gpu.clique"
        assert term["labelSelector"]["matchExpressions"][0]["values"] == list(NODE_ROLES)
    # The preference for a zone stays.
    assert "preferredDuringSchedulingIgnoredDuringExecution" in rack.pod("prefill")["affinity"]["podAffinity"]
    assert "resourceClaims" not in rack.pod("gateway")


def test_the_nvidia_overlay_refuses_links_that_are_slower_than_any_sound_network(nvidia: Rendered) -> None:
    for role in NODE_ROLES:
        settings = SETTINGS[role].model_validate(nvidia.settings(role))
        assert isinstance(settings, NodeSettings)
        assert settings.link_floor_gb_per_s == 1.0


def test_rdma_comes_with_the_images_that_have_it(rdma: Rendered) -> None:
    for role in NODE_ROLES:
        assert rdma.container(role)["image"].startswith(f"baton-{role}-rdma:")
