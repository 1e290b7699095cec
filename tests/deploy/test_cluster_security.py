"""TLS, keys and what clusters add to them: each part of the protection alone, in the chart and the kustomizations."""

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.gateway.process.process import check_doors
from baton.rpc.server import ListenAddress
from baton.security.exposure import check_exposed
from baton.settings.gateway_config import GatewaySettings, PickerSettings
from baton.settings.node_config import DecodeSettings
from tests.deploy.chart import Helm, Refused, Values, merged, values_of
from tests.deploy.manifests import BASE, KUSTOMIZE, NODE_ROLES, NVIDIA, ROLES, Manifest, Rendered, render_with, validate
from tests.deploy.test_chart import comparable, differences
from tests.deploy.test_manifests import allowed_into

COMPONENTS = KUSTOMIZE / "components"
POOL: Values = {"tls": {"client": False}, "inferencePool": {"enabled": True}}
OPENSHIFT: Values = {"podSecurity": {"runAsUser": None, "runAsGroup": None}}
TRACED: Values = {"tracing": {"endpoint": "http://collector.monitoring:4317", "namespace": "monitoring"}}
CERT_MANAGER: Values = {"tls": {"certManager": {"enabled": True}}}
INNER, CLIENT, KEYS = "inner-tls", "client-tls", "api-keys"
UCX = "20000-20999"

Make = Callable[..., Rendered]


@pytest.fixture(scope="module")
def with_components(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Renders a kustomization with components added."""

    def make(*names: str, base: Path = BASE) -> Rendered:
        return render_with(tmp_path_factory.mktemp("overlay"), base, *(COMPONENTS / name for name in names))

    return make


@pytest.mark.parametrize(
    ("components", "files", "values"),
    [
        (("tls",), (), {}),
        (("tls", "tracing"), (), TRACED),
        (("tls", "istio"), (), {"mesh": "istio"}),
        (("tls", "linkerd"), (), {"mesh": "linkerd"}),
        (("tls", "openshift"), (), OPENSHIFT),
        (("insecure-inside", CLIENT, KEYS), (), {"tls": {"inner": False}}),
        ((INNER, "insecure-outside", KEYS), (), {"tls": {"client": False}}),
        ((INNER, CLIENT), (), {"apiKeys": {"enabled": False}}),
        (("secure-inference-pool",), (), POOL),
        (("secure-inference-pool", "openshift"), (), merged([POOL, OPENSHIFT])),
        (
            ("secure-inference-pool", "cert-manager", "cert-manager/picker"), (),
            merged([POOL, CERT_MANAGER]),
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_chart_and_components_are_equal(
    helm: Helm, with_components: Make, components: tuple[str, ...], files: tuple[str, ...], values: Values
) -> None:
    release = helm.release(values_of(*files), values)
    ours, theirs = comparable(release.rendered), comparable(with_components(*components))
    del theirs["Namespace baton"]
    if "cert-manager" in components:  # the component makes the certificate for clients whether it is used or not
        del theirs["Certificate baton-client"]
    assert set(ours) == set(theirs)
    assert [line for name, item in ours.items() for line in differences(item, theirs[name], name)] == []
    assert release.complaints == ()
    for item in release.rendered.objects:
        validate(item)


@pytest.mark.parametrize(("inner", "client", "keys"), list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("insecure", [False, True])
def test_each_part_of_the_protection_can_be_used_alone(
    helm: Helm, inner: bool, client: bool, keys: bool, insecure: bool
) -> None:
    """Whatever the others are, the settings are those of the part, and every process accepts to listen."""
    values: Values = {
        "insecure": insecure,
        "tls": {"inner": inner, "client": client},
        "apiKeys": {"enabled": keys},
    }
    release = helm.release(values)
    check_protection(release.rendered, inner=inner, client=client, keys=keys)
    notes = re.findall(r"get secret (.*)", release.notes)
    mounted = secrets(release.rendered)
    assert set(notes[0].split() if notes else ()) == mounted


@pytest.mark.parametrize(
    ("components", "inner", "client", "keys"),
    [
        (("insecure",), False, False, False),
        (("insecure-inside", CLIENT), False, True, False),
        (("insecure", KEYS), False, False, True),
        (("insecure-inside", CLIENT, KEYS), False, True, True),
        (("insecure-outside", INNER), True, False, False),
        (("insecure-outside", INNER, KEYS), True, False, True),
        ((INNER, CLIENT), True, True, False),
        (("tls",), True, True, True),
    ],
)
def test_each_component_of_the_protection_can_be_used_alone(
    with_components: Make, components: tuple[str, ...], inner: bool, client: bool, keys: bool
) -> None:
    check_protection(with_components(*components), inner=inner, client=client, keys=keys)


def check_protection(rendered: Rendered, *, inner: bool, client: bool, keys: bool) -> None:
    given = {role: rendered.settings(role) for role in ROLES}
    for role in ROLES:
        assert ("tls_cert" in given[role]) is inner
        assert ("tls" in volumes(rendered, role)) is inner
    assert ("client_tls_cert" in given["gateway"]) is client
    assert ("client-tls" in volumes(rendered, "gateway")) is client
    assert ("api_keys" in given["gateway"]) is keys
    assert ("api-keys" in volumes(rendered, "gateway")) is keys
    assert {role: "insecure" in given[role] for role in ROLES} == {
        "gateway": not client,
        "prefill": not inner,
        "decode": not inner,
    }
    check_doors(GatewaySettings.model_validate(given["gateway"]))
    node = DecodeSettings.model_validate(given["decode"])
    listen = ListenAddress.parse(node.listen, field="listen")
    check_exposed(listen, field="listen", tls=node.tls_cert is not None, tls_field="tls_cert", insecure=node.insecure)
    for name, tls in (("baton-gateway", client), ("baton-prefill", inner), ("baton-decode", inner)):
        for port in rendered.find("Service", name)["spec"]["ports"]:
            assert (port["appProtocol"] == "https") is tls


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"inferencePool": {"enabled": True}},
            "inferencePool.enabled needs tls.client: false: an InferencePool cannot say that its pods speak TLS",
        ),
        (merged([{"insecure": True, "tls": {"client": True}}, {"inferencePool": {"enabled": True}}]), "tls.client"),
        (
            {"tls": {"inner": False}, "node": {"hosts": 2, "kind": "LeaderWorkerSet"}},
            "node.hosts above 1 needs tls.inner: true",
        ),
        ({"tracing": {"endpoint": "collector:4317"}}, "tracing.endpoint"),
        ({"mesh": "consul"}, "mesh"),
        ({"podSecurity": {"runAsUser": 0}}, "runAsUser"),
        ({"tls": {"inner": "yes"}}, "tls.inner"),
        ({"inferencePool": {"settings": {"BATON_POOL_METRICS_PORT": 1}}}, "BATON_POOL_METRICS_PORT"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(helm: Helm, values: Values, reason: str) -> None:
    with pytest.raises(Refused) as refused:
        helm.release(values)
    told = str(refused.value).replace("/", ".")
    assert reason in told or reason in str(refused.value)


def test_a_pool_keeps_keys_and_inner_tls_and_its_picker_has_tls(helm: Helm) -> None:
    rendered = helm.release(POOL).rendered
    check_protection(rendered, inner=True, client=False, keys=True)
    assert volumes(rendered, "picker")["tls"] == {"secretName": "baton-picker-tls"}
    picker = PickerSettings.model_validate(rendered.settings("picker"))
    assert not picker.insecure
    assert picker.client_tls_cert is not None
    # A proxy that adds TLS by a policy of its own speaks HTTP/2 in it.
    (port,) = rendered.find("Service", "baton-picker")["spec"]["ports"]
    assert port["appProtocol"] == "http2"


def test_a_picker_reads_metrics_that_need_no_key_where_policies_let_it(helm: Helm) -> None:
    rendered = helm.release(POOL).rendered
    picker = PickerSettings.model_validate(rendered.settings("picker"))
    gateway = rendered.settings("gateway")
    assert gateway["metrics_listen"] == f"[::]:{picker.pool_metrics_port}"
    assert ("picker", picker.pool_metrics_port, picker.pool_metrics_port) in allowed_into(rendered, "gateway")
    gateways = rendered.find("NetworkPolicy", "baton-picker")["spec"]["egress"][0]
    assert [port["port"] for port in gateways["ports"]] == [picker.pool_metrics_port]


def test_an_insecure_pool_is_as_it_was_and_may_have_single_parts(helm: Helm) -> None:
    insecure: Values = {"insecure": True, "inferencePool": {"enabled": True}}
    assert helm.release(insecure).rendered.settings("picker")["insecure"] == "true"
    rendered = helm.release(insecure, {"inferencePool": {"tls": True}}).rendered
    assert "insecure" not in rendered.settings("picker")
    assert "pool_metrics_port" not in rendered.settings("picker")
    check_protection(rendered, inner=False, client=False, keys=False)


def test_certificates_are_made_for_what_has_tls(helm: Helm) -> None:
    def made(*values: Values) -> set[str]:
        found = helm.release(CERT_MANAGER, *values).rendered.of_kind("Certificate")
        return {item["spec"]["secretName"] for item in found} - {"baton-ca"}

    roles = {f"baton-{role}-tls" for role in (*ROLES, "operator")}
    assert made() == {*roles, "baton-client-tls"}
    assert made(POOL) == {*roles, "baton-picker-tls"}
    assert made({"tls": {"inner": False}}) == {"baton-client-tls"}
    assert made({"insecure": True}) == set()


@pytest.mark.parametrize("files", [("cpu-demo",), ("nvidia", "autoscaled"), ("nvidia", "several-hosts")])
def test_openshift_assigns_users_and_groups_where_values_leave_them_out(helm: Helm, files: tuple[str, ...]) -> None:
    values: Values = merged([values_of(*files), OPENSHIFT])
    contexts = list(pod_contexts(helm.release(values).rendered))
    assert contexts
    assert {tuple(sorted(context)) for context in contexts} == {("runAsNonRoot", "seccompProfile")}
    values = merged([values, {"podSecurity": {"runAsUser": 1_000_660_000, "fsGroup": 7}}])
    for context in pod_contexts(helm.release(values).rendered):
        assert (context["runAsUser"], context["fsGroup"]) == (1_000_660_000, 7)
        assert "runAsGroup" not in context


def test_the_component_leaves_users_and_groups_out_in_every_pod(with_components: Make) -> None:
    components = ("tls", "model-download", "openshift")
    contexts = list(pod_contexts(with_components(*components, base=NVIDIA)))
    assert len(contexts) == len(ROLES) + 1
    assert {tuple(sorted(context)) for context in contexts} == {("runAsNonRoot", "seccompProfile")}


@pytest.mark.parametrize("files", [("cpu-demo",), ("nvidia", "autoscaled"), ("nvidia", "several-hosts")])
def test_who_may_ask_dns_may_ask_that_of_openshift(helm: Helm, files: tuple[str, ...]) -> None:
    rules = [
        {(port["protocol"], port["port"]) for port in rule["ports"]}
        for policy in helm.release(values_of(*files)).rendered.of_kind("NetworkPolicy")
        for rule in policy["spec"].get("egress", ())
        if any(port["port"] == 53 for port in rule.get("ports", ()))
    ]
    assert rules
    assert all(rule >= set(itertools.product(("UDP", "TCP"), (53, 5353))) for rule in rules)


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("http://collector:4317", 4317),
        ("https://collector.example.org:443/", 443),
        ("http://collector", 4317),
        ("http://[2001:db8::1]:4318", 4318),
        ("http://[2001:db8::1]", 4317),
    ],
)
def test_gateways_alone_reach_the_collector_at_its_port(helm: Helm, endpoint: str, port: int) -> None:
    rendered = helm.release({"tracing": {"endpoint": endpoint}}).rendered
    assert rendered.environment("gateway")["OTEL_EXPORTER_OTLP_ENDPOINT"] == endpoint
    spec = rendered.find("NetworkPolicy", "baton-tracing")["spec"]
    assert spec["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway"
    assert spec["egress"] == [{"ports": [{"protocol": "TCP", "port": port}]}]


@pytest.mark.parametrize("role", NODE_ROLES)
def test_a_mesh_leaves_ucx_and_inner_calls_alone(helm: Helm, role: str) -> None:
    ports = helm.release({}).rendered.ports(role)
    linkerd = annotations(helm, "linkerd", role)
    skipped = linkerd["config.linkerd.io/skip-inbound-ports"].split(",")
    assert {UCX, str(ports["grpc"]), "7003"} <= set(skipped)
    assert {UCX, "7002"} <= set(linkerd["config.linkerd.io/skip-outbound-ports"].split(","))
    assert annotations(helm, "istio", role) == {
        "traffic.sidecar.istio.io/includeInboundPorts": "",
        "traffic.sidecar.istio.io/includeOutboundIPRanges": "",
    }


def test_a_mesh_carries_what_clients_send_to_gateways(helm: Helm) -> None:
    for mesh in ("istio", "linkerd"):
        found = annotations(helm, mesh, "gateway")
        inbound = {port for name, ports in found.items() if "nbound" in name and "Out" not in name for port in [ports]}
        assert "7000" not in str(inbound)
        assert "8000" not in str(inbound)
        assert "7001,7002" in found.values()


def test_a_pods_own_annotations_win_over_those_for_a_mesh(helm: Helm) -> None:
    key = "config.linkerd.io/skip-inbound-ports"
    values: Values = {"mesh": "linkerd", "gateway": {"podAnnotations": {key: "1", "mine": "x"}}}
    found = helm.release(values).rendered.deployment("gateway")["spec"]["template"]["metadata"]["annotations"]
    assert (found[key], found["mine"]) == ("1", "x")


def annotations(helm: Helm, mesh: str, role: str) -> dict[str, str]:
    template = helm.release({"mesh": mesh}).rendered.deployment(role)["spec"]["template"]
    found: dict[str, str] = template["metadata"]["annotations"]
    return {name: value for name, value in found.items() if name != "checksum/settings"}


def volumes(rendered: Rendered, role: str) -> dict[str, Any]:
    """The secrets of a role's pod, by the volume's name."""
    return {item["name"]: item["secret"] for item in rendered.pod(role)["volumes"] if "secret" in item}


def secrets(rendered: Rendered) -> set[str]:
    return {secret["secretName"] for role in ROLES for secret in volumes(rendered, role).values()}


def pod_contexts(rendered: Rendered) -> Iterator[Manifest]:
    """The security context of every pod that the objects make."""
    for item in rendered.objects:
        spec = item.get("spec", {})
        for template in (spec.get("template"), spec.get("leaderWorkerTemplate", {}).get("workerTemplate")):
            if template:
                yield template["spec"]["securityContext"]


@pytest.mark.parametrize(
    "components",
    [
        ("tls", "model-volume", "compile-cache", "openshift"),
        ("tls", "compile-cache", "disaggregated-set", "openshift"),
    ],
)
def test_the_component_also_takes_the_group_of_the_compile_cache(
    with_components: Make, components: tuple[str, ...]
) -> None:
    rendered = with_components(*components)
    assert groups(rendered) == set()


@pytest.mark.parametrize("overlay", ["nvidia-leader-worker-set", "nvidia-several-hosts", "nvidia-disaggregated-set"])
def test_the_component_reaches_pods_of_sets(tmp_path: Path, overlay: str) -> None:
    rendered = render_with(tmp_path, KUSTOMIZE / "overlays" / overlay, KUSTOMIZE / "components" / "openshift")
    assert groups(rendered) == set()


def test_a_pool_and_a_monitor_open_the_metrics_port_once(with_components: Make) -> None:
    ports = with_components("pod-monitor", "secure-inference-pool").container("gateway")["ports"]
    assert sorted(port["containerPort"] for port in ports) == [7000, 8000, 9400]


@pytest.mark.parametrize("mesh", ["istio", "linkerd"])
def test_a_download_has_no_sidecar_which_its_policy_would_cut_off(helm: Helm, with_components: Make, mesh: str) -> None:
    model = {"directory": "m", "download": {"enabled": True, "repository": "a/m"}}
    own = {"istio": ("labels", "sidecar.istio.io/inject"), "linkerd": ("annotations", "linkerd.io/inject")}
    part, key = own[mesh]
    for rendered in (
        helm.release({"mesh": mesh, "model": model}).rendered,
        with_components("tls", "model-download", mesh, base=NVIDIA),
    ):
        metadata = rendered.job()["spec"]["template"]["metadata"]
        assert metadata[part][key] == {"istio": "false", "linkerd": "disabled"}[mesh]
        assert metadata["labels"]["app.kubernetes.io/name"] == "baton-model-download"


def test_linkerd_leaves_the_probes_of_a_joint_pod_alone(helm: Helm) -> None:
    values: Values = {"mesh": "linkerd", "nvlinkPair": {"enabled": True}}
    template = helm.release(values).rendered.deployment("decode")["spec"]["template"]
    skipped = template["metadata"]["annotations"]["config.linkerd.io/skip-inbound-ports"].split(",")
    probes = {str(container["livenessProbe"]["grpc"]["port"]) for container in template["spec"]["containers"]}
    assert probes <= set(skipped)


def groups(rendered: Rendered) -> set[str]:
    """Fields of any pod that name a user or a group."""
    text = yaml.safe_dump([item for item in rendered.objects if item["kind"] != "ConfigMap"])
    return set(re.findall("runAsUser|runAsGroup|fsGroup:", text))
