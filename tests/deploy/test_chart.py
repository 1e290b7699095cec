"""The Helm chart and the kustomizations are two spellings of the same objects."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from baton.core.version import __version__
from deploy.monitoring import prometheus_rule
from tests.deploy.chart import CHART, Helm, Refused, Release, Values, merged, values_of
from tests.deploy.manifests import (
    CPU_DEMO,
    KUSTOMIZE,
    NODE_ROLES,
    NVIDIA,
    ROLES,
    Manifest,
    Rendered,
    render_with,
    validate,
)

# Labels and annotations that a chart has and a kustomization has not.
HELM_KEYS = {
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/version",
    "checksum/settings",
    "helm.sh/chart",
    "helm.sh/resource-policy",
}
# Names that end in a hash of the content.
HASHED = re.compile(
    r"^(baton(?:-gateway|-prefill|-decode|-picker)?)-[0-9a-z]{10}$|^(baton-model-download)-[0-9a-z]{7,10}$"
)
PAIRED = ("pod-monitor", "nvlink-pair")
POOLED_VALUES: Values = {"inferencePool": {"enabled": True}}
PAIRED_VALUES: Values = {"nvlinkPair": {"enabled": True}, "podMonitor": {"enabled": True}}
DIGEST = "sha256:" + "0" * 64

# Files of values, and the fixture of the overlay that they are the same as.
OVERLAYS_AS_VALUES = {
    "cpu_demo": ("cpu-demo",),
    "nvidia": ("nvidia",),
    "scaled": ("nvidia", "autoscaled"),
    "sets": ("nvidia", "leader-worker-set"),
    "several_hosts": ("nvidia", "several-hosts"),
    "disaggregated": ("nvidia", "disaggregated-set"),
    "everything_else": ("nvidia",),
    "pooled": ("cpu-demo",),
    "paired": ("nvidia",),
}
EVERYTHING_ELSE = (
    "cert-manager",
    "endpoint-slices",
    "pod-monitor",
    "keda",
    "monitoring",
    "dashboard",
    "rdma",
    "arm64",
    "compile-cache",
    "compute-domain",
)
METERED: dict[str, Any] = {"podMonitor": {"enabled": True}}
EVERYTHING_ELSE_VALUES: Values = METERED | {
    "tls": {"certManager": {"enabled": True}},
    "endpointSlices": {"enabled": True},
    "autoscaling": {"by": "keda"},
    "prometheusRule": {"enabled": True},
    "dashboard": {"enabled": True},
    "rdma": {"enabled": True},
    "gateway": {"image": {"repository": "baton-gateway-kubernetes"}},
    "prefill": {"image": {"repository": "baton-prefill-rdma"}},
    "decode": {"image": {"repository": "baton-decode-rdma"}},
    "images": {"architecture": "arm64"},
    "node": {"compileCache": {"enabled": True}},
    "computeDomain": {"enabled": True},
}
MORE_VALUES = {"everything_else": EVERYTHING_ELSE_VALUES, "pooled": POOLED_VALUES, "paired": PAIRED_VALUES}


@pytest.fixture(scope="module")
def everything_else(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    """Every component that no overlay has."""
    here = tmp_path_factory.mktemp("overlay").resolve()
    return render_with(here, NVIDIA, *(KUSTOMIZE / "components" / name for name in EVERYTHING_ELSE))


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return render_with(tmp_path_factory.mktemp("pool"), CPU_DEMO, KUSTOMIZE / "components" / "inference-pool")


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return render_with(tmp_path_factory.mktemp("pair"), NVIDIA, *(KUSTOMIZE / "components" / name for name in PAIRED))


@pytest.fixture(scope="module", params=OVERLAYS_AS_VALUES)
def both(request: pytest.FixtureRequest, helm: Helm) -> tuple[Release, Rendered]:
    more = MORE_VALUES.get(request.param, {})
    chart = helm.release(values_of(*OVERLAYS_AS_VALUES[request.param]), more)
    return chart, request.getfixturevalue(request.param)


def test_the_chart_has_the_objects_of_the_kustomization(both: tuple[Release, Rendered]) -> None:
    chart, kustomization = both
    ours, theirs = comparable(chart.rendered), comparable(kustomization)
    # The namespace comes from `helm install --create-namespace`.
    del theirs["Namespace baton"]
    assert set(ours) == set(theirs)
    for name, item in ours.items():
        assert list(differences(item, theirs[name], name)) == []


def test_helm_lint_finds_nothing(both: tuple[Release, Rendered]) -> None:
    chart, _ = both
    assert chart.complaints == ()


def test_the_schemas_accept_the_components_that_no_overlay_has(everything_else: Rendered, nvidia: Rendered) -> None:
    for item in everything_else.objects:
        if item not in nvidia.objects:
            validate(item)


def test_selectors_are_of_one_release(both: tuple[Release, Rendered]) -> None:
    chart, _ = both
    for item in chart.rendered.objects:
        for labels in selectors(item.get("spec", {})):
            assert labels["app.kubernetes.io/instance"] == "baton"


def test_the_notes_name_the_secrets_that_pods_mount_and_the_job(helm: Helm) -> None:
    chart = helm.release(values_of("nvidia", "autoscaled"))
    mounted = {
        volume["secret"]["secretName"]
        for _, pod in chart.rendered.pods()
        for volume in pod["volumes"]
        if "secret" in volume
    }
    (line,) = re.findall(r"get secret (.*)", chart.notes)
    assert set(line.split()) == mounted
    (job,) = chart.rendered.of_kind("Job")
    assert f"job/{job['metadata']['name']}" in chart.notes


def test_another_release_shares_no_name_and_no_certificate_name_of_its_services(helm: Helm) -> None:
    values = merged([values_of("nvidia", "autoscaled"), {"tls": {"certManager": {"enabled": True}}}])
    first = helm.release(values).rendered
    second = helm.release(values, name="blue", namespace="team").rendered
    assert not {ident(item) for item in first.objects} & {ident(item) for item in second.objects}
    assert {item["metadata"].get("namespace", "none") for item in second.objects} == {"team", "none"}
    assert "blue-baton-gateway.team.svc" in second.find("Certificate", "blue-baton-client")["spec"]["dnsNames"]
    # Processes expect these, whatever the release is called.
    assert second.find("Certificate", "blue-baton-decode")["spec"]["uris"] == ["spiffe://baton/decode"]


def test_a_changed_setting_restarts_the_pods_that_read_it(helm: Helm) -> None:
    def checksums(values: Values) -> dict[str, str]:
        found = helm.release({"insecure": True}, values).rendered
        return {
            role: found.deployment(role)["spec"]["template"]["metadata"]["annotations"]["checksum/settings"]
            for role in ROLES
        }

    usual = checksums({})
    for section, restarted in (("decode", {"decode"}), ("node", set(NODE_ROLES)), ("gateway", {"gateway"})):
        changed = checksums({section: {"settings": {"BATON_LOG_LEVEL": "debug"}}})
        assert {role for role in ROLES if changed[role] != usual[role]} == restarted


def test_a_changed_download_is_another_job_and_a_changed_setting_is_not(helm: Helm) -> None:
    def job(values: Values) -> str:
        (found,) = helm.release(values_of("nvidia", "autoscaled"), values).rendered.of_kind("Job")
        return str(found["metadata"]["name"])

    usual = job({})
    assert job({"gateway": {"settings": {"BATON_LOG_LEVEL": "debug"}}}) == usual
    assert job({"model": {"download": {"revision": "1234"}}}) != usual


def test_images_come_from_the_registry_by_digest(helm: Helm) -> None:
    images = {"registry": "registry.example.com/team/", "pullPolicy": "Always", "pullSecrets": ["pull"]}
    found = helm.release({"insecure": True, "images": images, "decode": {"image": {"digest": DIGEST}}}).rendered
    assert found.container("decode")["image"] == f"registry.example.com/team/baton-decode@{DIGEST}"
    assert found.container("prefill")["image"] == f"registry.example.com/team/baton-prefill:{__version__}"
    assert found.container("gateway")["imagePullPolicy"] == "Always"
    assert {tuple(item["name"] for item in pod["imagePullSecrets"]) for _, pod in found.pods()} == {("pull",)}


def test_a_role_wins_over_what_both_node_roles_have(helm: Helm) -> None:
    values: Values = {
        "insecure": True,
        "decode": {
            "resources": {"limits": {"memory": "8Gi"}},
            "nodeSelector": {"disk": "fast"},
            "env": [{"name": "UCX_LOG_LEVEL", "value": "info"}],
            "settings": {"BATON_KV_CACHE_LAYOUT": "HND"},
        },
    }
    found = helm.release(values).rendered
    assert found.container("decode")["resources"]["limits"] == {"memory": "8Gi"}
    assert found.container("prefill")["resources"]["limits"] == {"memory": "2Gi"}
    assert found.pod("decode")["nodeSelector"] == {"disk": "fast"}
    assert "nodeSelector" not in found.pod("prefill")
    assert found.environment("decode")["UCX_LOG_LEVEL"] == "info"
    assert found.settings("decode")["kv_cache_layout"] == "HND"
    assert "kv_cache_layout" not in found.settings("prefill")


def test_claims_and_secrets_that_exist_are_used(helm: Helm) -> None:
    values: Values = {
        "tls": {"secrets": {"decode": "our-decode", "client": "our-client"}},
        "apiKeys": {"secret": "our-keys"},
        "model": {"directory": "llama", "volume": {"existingClaim": "our-models"}},
    }
    found = helm.release(values).rendered
    assert not found.of_kind("PersistentVolumeClaim")
    volumes = {role: {volume["name"]: volume for volume in pod["volumes"]} for role, pod in found.pods()}
    assert {role: volumes[role]["tls"]["secret"]["secretName"] for role in ROLES} == {
        "gateway": "baton-gateway-tls",
        "prefill": "baton-prefill-tls",
        "decode": "our-decode",
    }
    assert volumes["gateway"]["client-tls"]["secret"]["secretName"] == "our-client"
    assert volumes["gateway"]["api-keys"]["secret"]["secretName"] == "our-keys"
    for role in ROLES:
        assert volumes[role]["model"]["persistentVolumeClaim"]["claimName"] == "our-models"
        assert found.settings(role)["model"] == "/models/llama"


def test_a_release_may_be_called_by_a_number(helm: Helm) -> None:
    for item in helm.release({"insecure": True}, name="123").rendered.objects:
        assert item["metadata"]["labels"]["app.kubernetes.io/instance"] == "123"


def test_alerts_link_to_the_page_that_the_values_name(helm: Helm) -> None:
    rules = {"enabled": True, "runbook": "https://docs.example.org/operations/"}
    (made,) = helm.release({"insecure": True, "prometheusRule": rules}).rendered.of_kind("PrometheusRule")
    links = re.findall(r"'runbook_url': '([^#]*)#", str(made))
    assert set(links) == {"https://docs.example.org/operations/"}


def test_large_numbers_are_written_out(helm: Helm) -> None:
    found = helm.release({"insecure": True, "node": {"settings": {"BATON_KV_CACHE_MIB": 10_000_000}}}).rendered
    assert found.settings("decode")["kv_cache_mib"] == "10000000"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"decode": {"replica": 3}}, "replica"),
        ({"decode": {"settings": {"BATON_LISTEN": "0.0.0.0:1"}}}, "BATON_LISTEN"),
        ({"decode": {"settings": {"KV_CACHE_MIB": "1"}}}, "KV_CACHE_MIB"),
        (
            {"decode": {"settings": {"BATON_DRAIN_GRACE_S": 600}, "terminationGracePeriodSeconds": 150}},
            "use 610 or more",
        ),
        ({"insecure": False, "inferencePool": {"enabled": True}}, "inferencePool.enabled needs tls.client: false"),
        ({"decode": {"image": {"digest": "sha256:1"}}}, "digest"),
        ({"autoscaling": {"by": "hpa"}}, "needs podMonitor.enabled"),
        (
            {"autoscaling": {"by": "hpa"}, "podMonitor": {"enabled": True}, "node": {"kind": "DisaggregatedSet"}},
            "node.kind",
        ),
        ({"node": {"hosts": 2}}, "node.hosts above 1 needs node.kind LeaderWorkerSet"),
        ({"node": {"hosts": 2, "kind": "LeaderWorkerSet"}}, "node.hosts above 1 needs tls.inner: true"),
        (
            {
                "node": {
                    "hosts": 2,
                    "kind": "LeaderWorkerSet",
                    "settings": {"BATON_TENSOR_PARALLEL_SIZE": 2},
                },
                "tls": {"inner": True},
                "mesh": "linkerd",
            },
            "mesh: linkerd and node.hosts above 1",
        ),
        ({"nvlinkPair": {"enabled": True}, "prefill": {"nodeSelector": {"a": "b"}}}, "use decode.nodeSelector"),
        (
            {"nvlinkPair": {"enabled": True}, "prefill": {"extra": {"podLabels": {"a": "b"}}}},
            "use decode.extra.podLabels",
        ),
        (
            {"node": {"kind": "DisaggregatedSet"}, "decode": {"extra": {"workloadLabels": {"a": "b"}}}},
            "use node.extra.workloadLabels",
        ),
        ({"autoscaling": {"by": "vpa"}}, "autoscaling"),
        ({"podSecurity": None}, "podSecurity"),
        ({"gateway": {"nodeSelector": None}}, "nodeSelector"),
        ({"decode": {"rollout": None}}, "rollout"),
        ({"model": {"download": {"enabled": True}}}, "needs model.directory"),
        ({"model": {"directory": "x", "download": {"enabled": True}}}, "needs model.download.repository"),
        ({"model": {"directory": "../x"}}, "directory"),
    ],
)
def test_wrong_values_are_refused_by_name(helm: Helm, values: Values, reason: str) -> None:
    with pytest.raises(Refused, match=re.escape(reason)):
        helm.release({"insecure": True}, values)


def test_the_charts_version_and_rules_are_those_of_the_tree() -> None:
    text = (CHART / "Chart.yaml").read_text()
    assert re.findall(r"^(?:version|appVersion): (.*)$", text, flags=re.MULTILINE) == [__version__, __version__]
    assert prometheus_rule.IN_CHART.read_text() == prometheus_rule.chart_rules(), "run `make docs`"


def ident(item: Manifest) -> str:
    return f"{item['kind']} {unhashed(item['metadata']['name'])}"


def unhashed(text: str) -> str:
    found = HASHED.match(text)
    return (found[1] or found[2]) if found else text


def comparable(rendered: Rendered) -> dict[str, Any]:
    """The objects by kind and name, without Helm's labels and without hashes in names."""
    return {ident(item): simplified(item) for item in rendered.objects}


def simplified(value: Any) -> Any:
    if isinstance(value, str):
        return unhashed(value)
    if isinstance(value, list):
        items = [simplified(item) for item in value]
        # Volumes and mounts, whose order means nothing.
        if all(
            isinstance(item, dict)
            and ({"mountPath", "emptyDir", "secret", "persistentVolumeClaim", "image"} & set(item))
            for item in items
        ):
            return sorted(items, key=lambda item: str(item["name"]))
        return items
    if isinstance(value, dict):
        found = {key: simplified(item) for key, item in value.items() if key not in HELM_KEYS}
        return {key: item for key, item in found.items() if not (key == "annotations" and not item)}
    return value


def differences(ours: Any, theirs: Any, place: str) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(set(ours) | set(theirs)):
            yield from differences(ours.get(key, "absent"), theirs.get(key, "absent"), f"{place}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(mine, other, f"{place}[{index}]")
    elif ours != theirs:
        yield f"{place}: chart {ours!r}, kustomization {theirs!r}"


def selectors(value: Any) -> Iterator[dict[str, str]]:
    """Every set of labels that selects Baton's pods."""
    if isinstance(value, list):
        for item in value:
            yield from selectors(item)
    elif isinstance(value, dict):
        if value.get("app.kubernetes.io/name", "").startswith("baton"):
            yield value
        for item in value.values():
            yield from selectors(item)
