"""Metrics, autoscalers, model download, priorities and LeaderWorkerSets: their objects fit each other."""

import os
import re
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema
import pytest
import yaml

from baton.metrics.declared import METRICS
from tests.deploy.chart import Helm, Refused, Values, values_of
from tests.deploy.manifests import (
    FIELDS,
    KUSTOMIZE,
    NODE_ROLES,
    NVIDIA,
    ROLES,
    Rendered,
    RenderingFailed,
    render,
    render_with,
    validate,
)
from tests.unit.baton.hub import hub

NAMES = {metric.name for metric in METRICS}
FROM_HISTOGRAM = "baton_inter_token_latency_p95_seconds"


@pytest.mark.parametrize("name", ["scaled", "keda", "sets", "disaggregated"])
def test_every_object_fits_its_schema(request: pytest.FixtureRequest, name: str) -> None:
    for item in request.getfixturevalue(name).objects:
        validate(item)


def test_a_misspelt_field_of_a_custom_object_would_not_be_accepted(keda: Rendered) -> None:
    wrong = keda.find("ScaledObject", "baton-decode")
    with pytest.raises(jsonschema.ValidationError):
        validate(wrong | {"spec": wrong["spec"] | {"minReplicas": 2}})


def test_prometheus_may_scrape_the_port_that_every_process_serves(scaled: Rendered) -> None:
    (endpoint,) = scaled.find("PodMonitor", "baton")["spec"]["podMetricsEndpoints"]
    (rule,) = scaled.find("NetworkPolicy", "baton-metrics")["spec"]["ingress"]
    for role in ROLES:
        port = scaled.ports(role)[endpoint["port"]]
        assert scaled.settings(role)["metrics_listen"] == f"[::]:{port}"
        assert [item["port"] for item in rule["ports"]] == [port]


def test_autoscalers_own_the_number_of_pods(scaled: Rendered, keda: Rendered) -> None:
    for role in ROLES:
        for rendered, kind in ((scaled, "HorizontalPodAutoscaler"), (keda, "ScaledObject")):
            assert "replicas" not in rendered.deployment(role)["spec"]
            target = rendered.find(kind, f"baton-{role}")["spec"]["scaleTargetRef"]
            assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"baton-{role}"}


def test_both_kinds_of_autoscaler_behave_alike(scaled: Rendered, keda: Rendered) -> None:
    for role in ROLES:
        hpa = scaled.find("HorizontalPodAutoscaler", f"baton-{role}")["spec"]
        other = keda.find("ScaledObject", f"baton-{role}")["spec"]
        assert other["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"]
        assert (other["minReplicaCount"], other["maxReplicaCount"]) == (hpa["minReplicas"], hpa["maxReplicas"])


def test_a_role_shrinks_by_one_pod_per_drain(scaled: Rendered) -> None:
    for role in ROLES:
        down = scaled.find("HorizontalPodAutoscaler", f"baton-{role}")["spec"]["behavior"]["scaleDown"]
        (policy,) = down["policies"]
        assert policy["value"] == 1
        assert policy["periodSeconds"] >= float(scaled.settings(role)["drain_grace_s"])


def test_every_signal_is_a_metric_of_its_process(scaled: Rendered, keda: Rendered) -> None:
    rules = yaml.safe_load((KUSTOMIZE / "components" / "hpa" / "prometheus-adapter.yaml").read_text())["rules"]
    served = re.compile(re.search(r'"(.+?)"', rules["custom"][0]["seriesQuery"])[1])  # type: ignore[index]
    for item in scaled.of_kind("HorizontalPodAutoscaler"):
        for metric in item["spec"]["metrics"]:
            if metric["type"] == "Pods":
                name = metric["pods"]["metric"]["name"]
                assert name in NAMES
                assert served.fullmatch(name)
            elif metric["type"] == "Object":
                assert metric["object"]["metric"]["name"] == rules["custom"][1]["name"]["as"] == FROM_HISTOGRAM
    queries = [trigger["metadata"].get("query", "") for trigger in triggers(keda)]
    used = {name.removesuffix("_bucket") for query in queries for name in re.findall(r"baton_\w+", query)}
    assert used == {
        "baton_prefill_backlog_seconds",
        "baton_kv_cache_usage_perc",
        "baton_inter_token_latency_seconds",
        "baton_num_requests_running",
    }
    assert used <= NAMES


def test_no_autoscaler_of_the_metrics_api_needs_an_external_metric(scaled: Rendered) -> None:
    """A cluster has one server of external metrics, and that is KEDA wherever KEDA is installed."""
    kinds = {metric["type"] for item in scaled.of_kind("HorizontalPodAutoscaler") for metric in item["spec"]["metrics"]}
    assert kinds == {"Resource", "Pods", "Object"}
    adapter = yaml.safe_load((KUSTOMIZE / "components" / "hpa" / "prometheus-adapter.yaml").read_text())
    assert "external" not in adapter["rules"]


def test_a_metric_of_a_release_is_one_of_the_namespace_and_names_the_release(scaled: Rendered) -> None:
    rules = yaml.safe_load((KUSTOMIZE / "components" / "hpa" / "prometheus-adapter.yaml").read_text())["rules"]
    (rule,) = [rule for rule in rules["custom"] if rule["name"]["as"] == FROM_HISTOGRAM]
    decode = scaled.find("HorizontalPodAutoscaler", "baton-decode")["spec"]
    (metric,) = [item["object"] for item in decode["metrics"] if item["type"] == "Object"]
    assert metric["describedObject"] == {"apiVersion": "v1", "kind": "Namespace", "name": "baton"}
    assert metric["metric"]["selector"] == {"matchLabels": {"release": released(scaled)}}
    # The adapter puts the selector into the matchers, and finds the answer by the labels of the group.
    assert rule["metricsQuery"].count("<<.LabelMatchers>>") == rule["metricsQuery"].count("<<.GroupBy>>") == 2


def released(rendered: Rendered) -> str:
    """The value of the label `release` of all series."""
    (endpoint,) = rendered.find("PodMonitor", "baton")["spec"]["podMetricsEndpoints"]
    (label,) = [item for item in endpoint["relabelings"] if item["targetLabel"] == "release"]
    return str(label["replacement"])


def test_every_query_of_keda_names_the_release(keda: Rendered) -> None:
    of_prometheus = [item["metadata"]["query"] for item in triggers(keda) if item["type"] == "prometheus"]
    assert len(of_prometheus) == 4
    for query in of_prometheus:
        assert f'namespace="baton",release="{released(keda)}"' in query


@pytest.mark.parametrize("by", ["hpa", "keda"])
def test_two_releases_of_the_chart_in_one_namespace_scale_on_series_of_their_own(helm: Helm, by: str) -> None:
    values: Values = {"insecure": True, "podMonitor": {"enabled": True}, "autoscaling": {"by": by}}
    for name in ("blue", "green"):
        found = helm.release(values, name=name).rendered
        (monitor,) = found.of_kind("PodMonitor")
        assert monitor["spec"]["podMetricsEndpoints"][0]["relabelings"] == [
            {"targetLabel": "release", "replacement": name}
        ]
        for query in [item["metadata"].get("query") for item in triggers(found)]:
            assert query is None or f'release="{name}"' in query
        for item in found.of_kind("HorizontalPodAutoscaler"):
            for metric in item["spec"]["metrics"]:
                if metric["type"] == "Object":
                    assert metric["object"]["metric"]["selector"] == {"matchLabels": {"release": name}}


def test_kube_prometheus_stack_selects_monitor_and_rules(everything_monitored: Rendered, helm: Helm) -> None:
    values: Values = {"insecure": True, "podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}}
    for rendered in (everything_monitored, helm.release(values).rendered):
        for kind in ("PodMonitor", "PrometheusRule"):
            assert rendered.find(kind, "baton")["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    ours: Values = {"podMonitor": {"labels": {"release": "prometheus"}}}
    (monitor,) = helm.release(values, ours).rendered.of_kind("PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


@pytest.fixture(scope="module")
def everything_monitored(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    components = (KUSTOMIZE / "components" / name for name in ("pod-monitor", "monitoring"))
    return render_with(tmp_path_factory.mktemp("monitored"), NVIDIA, *components)


@pytest.mark.parametrize("order", [("hpa", "keda"), ("keda", "hpa")])
def test_two_kinds_of_autoscaler_together_are_refused(tmp_path: Path, order: tuple[str, str]) -> None:
    components = (KUSTOMIZE / "components" / name for name in ("pod-monitor", *order))
    with pytest.raises(RenderingFailed, match=r"remove.*/spec/replicas"):
        render_with(tmp_path, NVIDIA, *components)


def test_no_set_has_the_name_of_a_service(sets: Rendered, several_hosts: Rendered, helm: Helm) -> None:
    """Its controller makes a Service with the set's name."""
    chart = helm.release(values_of("nvidia", "leader-worker-set")).rendered
    for rendered in (sets, several_hosts, chart):
        names = {item["metadata"]["name"] for item in rendered.of_kind("LeaderWorkerSet")}
        assert names == {"baton-prefill-set", "baton-decode-set"}
        assert not names & {item["metadata"]["name"] for item in rendered.of_kind("Service")}


def test_autoscalers_of_sets_find_them(tmp_path: Path, helm: Helm) -> None:
    components = ("pod-monitor", "hpa", "leader-worker-set")
    kustomization = with_references(tmp_path, *components)
    chart = helm.release(values_of("nvidia", "autoscaled", "leader-worker-set")).rendered
    for rendered in (kustomization, chart):
        for role in NODE_ROLES:
            assert "replicas" not in rendered.find("LeaderWorkerSet", f"baton-{role}-set")["spec"]
            assert rendered.find("HorizontalPodAutoscaler", f"baton-{role}")["spec"]["scaleTargetRef"] == {
                "apiVersion": "leaderworkerset.x-k8s.io/v1",
                "kind": "LeaderWorkerSet",
                "name": f"baton-{role}-set",
            }


def with_references(here: Path, *components: str) -> Rendered:
    """The overlay nvidia with components, one of which makes sets."""
    here = here.resolve()
    overlay = KUSTOMIZE / "overlays" / "nvidia-leader-worker-set"
    (here / "references.yaml").write_text((overlay / "references.yaml").read_text())
    kustomization = {
        "namespace": "baton",
        "resources": [os.path.relpath(NVIDIA, here)],
        "components": [os.path.relpath(KUSTOMIZE / "components" / name, here) for name in components],
        "configurations": ["references.yaml"],
    }
    (here / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return render(here)


def triggers(rendered: Rendered) -> list[dict[str, Any]]:
    return [trigger for item in rendered.of_kind("ScaledObject") for trigger in item["spec"]["triggers"]]


def test_pods_on_gpu_hosts_have_a_priority_and_tolerate_their_taint(scaled: Rendered) -> None:
    classes = {item["metadata"]["name"]: item["value"] for item in scaled.of_kind("PriorityClass")}
    assert {scaled.pod(role)["priorityClassName"] for role in NODE_ROLES} == {"baton-node"}
    assert classes[scaled.pod("gateway")["priorityClassName"]] > classes["baton-node"]
    for role in NODE_ROLES:
        assert scaled.pod(role)["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_sets_have_the_pods_of_the_deployments(sets: Rendered, nvidia: Rendered) -> None:
    assert [item["metadata"]["name"] for item in sets.of_kind("Deployment")] == ["baton-gateway"]
    names = {item["metadata"]["name"] for item in sets.of_kind("ConfigMap")}
    for role in NODE_ROLES:
        template = sets.find("LeaderWorkerSet", f"baton-{role}-set")["spec"]["leaderWorkerTemplate"]
        assert template["size"] == 1
        pod, usual = template["workerTemplate"]["spec"], nvidia.pod(role)
        assert pod["containers"][0]["image"] == usual["containers"][0]["image"]
        assert [item["name"] for item in pod["volumes"]] == [item["name"] for item in usual["volumes"]]
        assert {source["configMapRef"]["name"] for source in pod["containers"][0]["envFrom"]} <= names


def test_one_set_of_both_roles_has_the_pods_of_the_deployments(disaggregated: Rendered, nvidia: Rendered) -> None:
    assert [item["metadata"]["name"] for item in disaggregated.of_kind("Deployment")] == ["baton-gateway"]
    roles = {item["name"]: item["spec"] for item in disaggregated.find("DisaggregatedSet", "baton")["spec"]["roles"]}
    assert set(roles) == set(NODE_ROLES)
    for role, spec in roles.items():
        template = spec["leaderWorkerTemplate"]["workerTemplate"]
        assert template == nvidia.deployment(role)["spec"]["template"]
        assert (
            spec["rolloutStrategy"]["rollingUpdateConfiguration"]
            == (nvidia.deployment(role)["spec"]["strategy"]["rollingUpdate"])
        )


def test_every_image_of_the_example_is_pinned_by_digest(pinned: Rendered) -> None:
    job = pinned.job()["spec"]["template"]["spec"]
    for pod in (job, *(pod for _, pod in pinned.pods())):
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert re.fullmatch(r"registry\.example\.com/baton-[a-z-]+@sha256:0{64}", container["image"])


def test_a_changed_setting_leaves_the_job_alone(scaled: Rendered) -> None:
    # A Job cannot change, and a ConfigMap's name changes with every setting.
    (container,) = scaled.job()["spec"]["template"]["spec"]["containers"]
    assert "envFrom" not in container
    given = {item["name"]: item["value"] for item in container["env"]}
    assert given["BATON_MODEL"] == scaled.settings("gateway")["model"]


def test_the_hubs_token_is_a_file(scaled: Rendered) -> None:
    job = scaled.job()["spec"]["template"]["spec"]
    (container,) = job["containers"]
    folders = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    path = PurePosixPath({item["name"]: item["value"] for item in container["env"]}["HF_TOKEN_PATH"])
    volumes = {volume["name"]: volume for volume in job["volumes"]}
    assert volumes[folders[str(path.parent)]]["secret"] == {"secretName": "baton-hub", "optional": True}


def download(scaled: Rendered, model: Path, endpoint: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    job = scaled.job()["spec"]["template"]["spec"]["containers"][0]
    given = {item["name"]: item["value"] for item in job["env"] if "value" in item}
    environment = given | {
        "PATH": os.pathsep.join([HF.as_posix(), os.environ["PATH"]]),
        "HOME": str(tmp_path),
        "HF_ENDPOINT": endpoint,
        "BATON_MODEL": str(model),
        "MODEL_REPOSITORY": "owner/model",
        "HF_TOKEN_PATH": str(tmp_path / "token"),
    }
    return subprocess.run(job["command"], env=environment, capture_output=True, text=True, timeout=300, check=False)


def _programs() -> Path:
    import huggingface_hub

    return Path(huggingface_hub.__file__).parents[4] / "bin"


HF = _programs()


def test_the_jobs_command_downloads_the_model_that_pods_wait_for(scaled: Rendered, tmp_path: Path) -> None:
    model = tmp_path / "model"
    files = {"config.json": b"{}", "model.safetensors": b"weights", "original/other.safetensors": b"unused"}
    (tmp_path / "token").write_text("hf_secret\n")
    with hub(files) as running:
        first = download(scaled, model, running.endpoint, tmp_path)
        again = download(scaled, model, running.endpoint, tmp_path)
    assert first.returncode == 0, first.stderr
    assert (model / "model.safetensors").read_bytes() == b"weights"
    assert not (model / "original").exists()
    assert "Bearer hf_secret" in running.authorizations
    assert again.stdout == f"{model} is owner/model@main\n"
    (wait,) = scaled.pod("decode")["initContainers"]
    given = {"MODEL_REPOSITORY": "owner/model", "MODEL_REVISION": "main", "BATON_MODEL": str(model)}
    subprocess.run(wait["command"], env=given, timeout=60, check=True)


def test_the_wait_for_the_model_leaves_other_init_containers(tmp_path: Path) -> None:
    here = tmp_path.resolve()
    other = [{"op": "add", "path": "/spec/template/spec/initContainers", "value": [{"name": "mine", "image": "mine"}]}]
    target = {"kind": "Deployment", "labelSelector": "app.kubernetes.io/name=baton"}
    kustomization = {
        "resources": [os.path.relpath(KUSTOMIZE / "overlays" / "nvidia", here)],
        "components": ["mine", os.path.relpath(KUSTOMIZE / "components" / "model-download", here)],
    }
    component = {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        "patches": [{"target": target, "patch": yaml.safe_dump(other)}],
    }
    (here / "mine").mkdir()
    (here / "mine" / "kustomization.yaml").write_text(yaml.safe_dump(component))
    (here / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    found = render(here)
    for role in ROLES:
        assert {item["name"] for item in found.pod(role)["initContainers"]} == {"mine", "wait-for-model"}


def test_a_node_of_several_hosts_is_a_group_whose_first_pod_serves(several_hosts: Rendered) -> None:
    for role in NODE_ROLES:
        template = several_hosts.find("LeaderWorkerSet", f"baton-{role}-set")["spec"]["leaderWorkerTemplate"]
        (container,) = template["workerTemplate"]["spec"]["containers"]
        settings = several_hosts.environment_of(container, FIELDS)
        assert (
            int(settings["BATON_TENSOR_PARALLEL_SIZE"])
            == template["size"] * container["resources"]["limits"]["nvidia.com/gpu"]
        )
        assert settings["BATON_TLS_CERT"]
        selector = several_hosts.find("Service", f"baton-{role}")["spec"]["selector"]
        assert selector["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
        validate(several_hosts.find("LeaderWorkerSet", f"baton-{role}-set"))


def gibibytes(quantity: str) -> int:
    return int(quantity.removesuffix("Gi"))


def sizes(pod: dict[str, Any]) -> dict[str, int]:
    """Of one pod of nodes: CPUs, memory and /dev/shm in GiB."""
    (container,) = pod["containers"]
    (shm,) = [item["emptyDir"] for item in pod["volumes"] if item["name"] == "shm"]
    assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
    return {
        "cpu": int(container["resources"]["requests"]["cpu"]),
        "memory": gibibytes(container["resources"]["limits"]["memory"]),
        "shm": gibibytes(shm["sizeLimit"]),
    }


@pytest.mark.parametrize(("name", "ranks_per_pod"), [("sets", 2), ("several_hosts", 8)])
def test_a_pod_has_the_sizes_of_one_rank_for_each_of_its_ranks(
    request: pytest.FixtureRequest, nvidia: Rendered, name: str, ranks_per_pod: int
) -> None:
    rendered = request.getfixturevalue(name)
    for role in NODE_ROLES:
        template = rendered.find("LeaderWorkerSet", f"baton-{role}-set")["spec"]["leaderWorkerTemplate"]
        pod = template["workerTemplate"]["spec"]
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == ranks_per_pod
        assert sizes(pod) == {key: ranks_per_pod * size for key, size in sizes(nvidia.pod(role)).items()}


def test_hosts_of_a_node_can_be_those_of_one_rack(helm: Helm) -> None:
    values = values_of("nvidia", "several-hosts")
    rack: Values = {"node": {"exclusiveTopology": "topology.example.com/rack"}}
    found = helm.release(values, rack).rendered
    for role in NODE_ROLES:
        annotations = found.find("LeaderWorkerSet", f"baton-{role}-set")["metadata"]["annotations"]
        assert annotations == {"leaderworkerset.sigs.k8s.io/exclusive-topology": "topology.example.com/rack"}
    usual = helm.release(values).rendered.find("LeaderWorkerSet", "baton-decode-set")["metadata"]
    assert "annotations" not in usual


def test_ranks_of_several_hosts_use_rdma_or_end(tmp_path: Path, helm: Helm) -> None:
    kustomization = with_references(tmp_path, "rdma", "several-hosts", "several-hosts-rdma")
    chart = helm.release(values_of("nvidia", "several-hosts"), {"rdma": {"enabled": True, "count": 8}}).rendered
    for rendered in (kustomization, chart):
        for role in NODE_ROLES:
            template = rendered.find("LeaderWorkerSet", f"baton-{role}-set")["spec"]["leaderWorkerTemplate"]
            (container,) = template["workerTemplate"]["spec"]["containers"]
            limits = container["resources"]["limits"]
            assert limits["rdma/hca"] == limits["nvidia.com/gpu"] == 8
            environment = rendered.environment_of(container, FIELDS)
            assert environment["NCCL_NET"] == "IB"
            assert environment["NCCL_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ({"settings": {"BATON_TENSOR_PARALLEL_SIZE": 15}}, "15, which node.hosts 2 does not divide"),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, "set nvidia.com/gpu of node.resources.limits to 8"),
        ({"hosts": 4}, "set nvidia.com/gpu of node.resources.limits to 4"),
        ({"exclusiveTopology": "no label!"}, "exclusiveTopology"),
    ],
)
def test_hosts_whose_gpus_are_not_the_ranks_are_refused(helm: Helm, node: Values, reason: str) -> None:
    with pytest.raises(Refused, match=re.escape(reason)):
        helm.release(values_of("nvidia", "several-hosts"), {"node": node})
