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
from tests.deploy.manifests import FIELDS, KUSTOMIZE, NODE_ROLES, ROLES, Rendered, render, validate
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
    external = [rule["name"]["as"] for rule in rules["external"]]
    for item in scaled.of_kind("HorizontalPodAutoscaler"):
        for metric in item["spec"]["metrics"]:
            if metric["type"] == "Pods":
                name = metric["pods"]["metric"]["name"]
                assert name in NAMES
                assert served.fullmatch(name)
            elif metric["type"] == "External":
                assert [metric["external"]["metric"]["name"]] == external == [FROM_HISTOGRAM]
    queries = [trigger["metadata"].get("query", "") for trigger in triggers(keda)]
    used = {name.removesuffix("_bucket") for query in queries for name in re.findall(r"baton_\w+", query)}
    assert used == {
        "baton_prefill_backlog_seconds",
        "baton_kv_cache_usage_perc",
        "baton_inter_token_latency_seconds",
        "baton_num_requests_running",
    }
    assert used <= NAMES


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
        template = sets.find("LeaderWorkerSet", f"baton-{role}")["spec"]["leaderWorkerTemplate"]
        assert template["size"] == 1
        pod, usual = template["workerTemplate"]["spec"], nvidia.pod(role)
        assert pod["containers"][0]["image"] == usual["containers"][0]["image"]
        assert pod["volumes"] == usual["volumes"]
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 2
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
    job = pinned.find("Job", "baton-model-download")["spec"]["template"]["spec"]
    for pod in (job, *(pod for _, pod in pinned.pods())):
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert re.fullmatch(r"registry\.example\.com/baton-[a-z-]+@sha256:0{64}", container["image"])


def test_a_changed_setting_leaves_the_job_alone(scaled: Rendered) -> None:
    # A Job cannot change, and a ConfigMap's name changes with every setting.
    (container,) = scaled.find("Job", "baton-model-download")["spec"]["template"]["spec"]["containers"]
    assert "envFrom" not in container
    given = {item["name"]: item["value"] for item in container["env"]}
    assert given["BATON_MODEL"] == scaled.settings("gateway")["model"]


def test_the_hubs_token_is_a_file(scaled: Rendered) -> None:
    job = scaled.find("Job", "baton-model-download")["spec"]["template"]["spec"]
    (container,) = job["containers"]
    folders = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    path = PurePosixPath({item["name"]: item["value"] for item in container["env"]}["HF_TOKEN_PATH"])
    volumes = {volume["name"]: volume for volume in job["volumes"]}
    assert volumes[folders[str(path.parent)]]["secret"] == {"secretName": "baton-hub", "optional": True}


def download(scaled: Rendered, model: Path, endpoint: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    job = scaled.find("Job", "baton-model-download")["spec"]["template"]["spec"]["containers"][0]
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
    assert again.stdout == f"{model} is there\n"
    (wait,) = scaled.pod("decode")["initContainers"]
    subprocess.run(wait["command"], env={"BATON_MODEL": str(model)}, timeout=60, check=True)


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
        template = several_hosts.find("LeaderWorkerSet", f"baton-{role}")["spec"]["leaderWorkerTemplate"]
        (container,) = template["workerTemplate"]["spec"]["containers"]
        settings = several_hosts.environment_of(container, FIELDS)
        assert (
            int(settings["BATON_TENSOR_PARALLEL_SIZE"])
            == template["size"] * container["resources"]["limits"]["nvidia.com/gpu"]
        )
        assert settings["BATON_TLS_CERT"]
        selector = several_hosts.find("Service", f"baton-{role}")["spec"]["selector"]
        assert selector["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
        validate(several_hosts.find("LeaderWorkerSet", f"baton-{role}"))
