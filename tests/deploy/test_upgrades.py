"""Upgrades: what a cluster would refuse, wait for without end, or cut off is refused or fits by the manifests alone."""

import copy
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from baton.settings.gateway_config import GatewaySettings
from tests.deploy.chart import Helm, Refused, Values, values_of
from tests.deploy.manifests import KUSTOMIZE, NODE_ROLES, OVERLAYS, ROLES, Manifest, Rendered, render, render_with
from tests.deploy.test_scaling import HF
from tests.unit.baton.hub import hub

AUTOSCALED = OVERLAYS / "nvidia-autoscaled"
DOWNLOAD = KUSTOMIZE / "components" / "model-download"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LONGEST_REQUEST_S = GatewaySettings.model_fields["request_timeout_s"].default
IN_PLACE = {"maxSurge": 0, "maxUnavailable": 1}


@pytest.fixture(scope="module")
def by_chart(helm: Helm) -> Rendered:
    return helm.release(values_of("nvidia", "autoscaled")).rendered


@pytest.fixture(scope="module", params=["chart", "kustomization"])
def deployed(request: pytest.FixtureRequest, by_chart: Rendered, scaled: Rendered) -> Rendered:
    """The autoscaled cluster with a download, in both spellings."""
    return by_chart if request.param == "chart" else scaled


def overlay(here: Path, **parts: object) -> Rendered:
    """The autoscaled overlay with more parts of a kustomization."""
    here = here.resolve()
    resources = [os.path.relpath(AUTOSCALED, here)]
    (here / "kustomization.yaml").write_text(yaml.safe_dump({"namespace": "baton", "resources": resources, **parts}))
    return render(here)


def other_model(here: Path) -> Rendered:
    """An overlay with another model, as the component model-download says to write it."""
    (here / "mine").mkdir()
    patch = [
        {
            "op": "replace",
            "path": f"/spec/template/spec/containers/0/env/{index}",
            "value": {"name": name, "value": value},
        }
        for index, (name, value) in enumerate(
            {
                "BATON_MODEL": "/models/main/llama",
                "MODEL_REPOSITORY": "owner/llama",
                "MODEL_REVISION": COMMIT,
            }.items()
        )
    ]
    component = {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        "patches": [{"target": {"kind": "Job"}, "patch": yaml.safe_dump(patch)}],
    }
    (here / "mine" / "kustomization.yaml").write_text(yaml.safe_dump(component))
    return overlay(here, components=["mine", os.path.relpath(DOWNLOAD / "pods-of-the-job", here.resolve())])


def variables(container: Manifest) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container["env"] if "value" in item}


def job_container(rendered: Rendered) -> Manifest:
    (container,) = rendered.job()["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def wait_of(rendered: Rendered, role: str) -> Manifest:
    (container,) = [item for item in rendered.pod(role)["initContainers"] if item["name"] == "wait-for-model"]
    assert isinstance(container, dict)
    return container


def test_another_image_revision_or_mirror_is_another_job(tmp_path: Path) -> None:
    def changed(name: str, **parts: object) -> str:
        (tmp_path / name).mkdir()
        return str(overlay(tmp_path / name, **parts).job()["metadata"]["name"])

    environment = {"op": "add", "path": "/spec/template/spec/containers/0/env/-"}
    mirror = yaml.safe_dump([environment | {"value": {"name": "HF_ENDPOINT", "value": "https://hub.example.com"}}])
    names = [
        changed("usual"),
        changed("tag", images=[{"name": "baton-gateway", "newTag": "0.2.1"}]),
        changed("digest", images=[{"name": "baton-gateway", "digest": f"sha256:{1:064}"}]),
        changed("mirror", patches=[{"target": {"kind": "Job"}, "patch": mirror}]),
        other_model(tmp_path).job()["metadata"]["name"],
    ]
    assert len(set(names)) == len(names)
    assert changed("again") == names[0]
    # A pod of the Job has its name as a label.
    assert all(len(name) <= 63 for name in names)


def test_another_setting_is_the_same_job(tmp_path: Path) -> None:
    changed = {"name": "baton", "namespace": "baton", "behavior": "merge", "literals": ["BATON_LOG_LEVEL=debug"]}
    assert overlay(tmp_path, configMapGenerator=[changed]).job() == overlay(tmp_path).job()


def test_a_job_names_nothing_whose_name_has_a_hash(scaled: Rendered) -> None:
    # kustomize adds the hash to a Job's name before it adds those of ConfigMaps to what names them.
    hashed = {item["metadata"]["name"] for item in scaled.of_kind("ConfigMap")}
    assert not [name for name in hashed if f"'{name}'" in str(scaled.job()["spec"])]


def test_the_path_has_the_revision_and_job_and_pods_mean_the_same_model(
    deployed: Rendered, helm: Helm, tmp_path: Path
) -> None:
    values: Values = {"model": {"directory": "llama", "download": {"repository": "owner/llama", "revision": COMMIT}}}
    charted = helm.release(values_of("nvidia", "autoscaled"), values).rendered
    for rendered, revision, repository, name in (
        (deployed, "main", "Qwen/Qwen3-8B", "Qwen3-8B"),
        (charted, COMMIT, "owner/llama", "llama"),
        (other_model(tmp_path), COMMIT, "owner/llama", "llama"),
    ):
        given = variables(job_container(rendered))
        assert given["BATON_MODEL"] == f"/models/{revision}/{name}"
        assert (given["MODEL_REPOSITORY"], given["MODEL_REVISION"]) == (repository, revision)
        for role in ROLES:
            assert rendered.settings(role)["model"] == given["BATON_MODEL"]
            assert variables(wait_of(rendered, role)) == {"MODEL_REPOSITORY": repository, "MODEL_REVISION": revision}


def test_another_revision_rolls_the_pods_of_every_role(by_chart: Rendered, helm: Helm) -> None:
    other = helm.release(values_of("nvidia", "autoscaled"), {"model": {"download": {"revision": COMMIT}}}).rendered
    for role in ROLES:
        before, after = (
            rendered.deployment(role)["spec"]["template"]["metadata"]["annotations"]["checksum/settings"]
            for rendered in (by_chart, other)
        )
        assert before != after


def test_another_revision_rolls_the_pods_of_a_kustomization(scaled: Rendered, tmp_path: Path) -> None:
    other = other_model(tmp_path)
    for role in ROLES:
        before, after = (
            {source["configMapRef"]["name"] for source in rendered.container(role)["envFrom"]}
            for rendered in (scaled, other)
        )
        assert before != after


def download(rendered: Rendered, tmp_path: Path, endpoint: str, **given: str) -> "subprocess.CompletedProcess[str]":
    """Runs the Job's command, with its volume in `tmp_path`."""
    container = job_container(rendered)
    environment = variables(container) | {
        "PATH": os.pathsep.join([HF.as_posix(), os.environ["PATH"]]),
        "HOME": str(tmp_path),
        "HF_ENDPOINT": endpoint,
        "HF_TOKEN_PATH": str(tmp_path / "token"),
        "BATON_MODEL": str(tmp_path / "models" / "main" / "model"),
        "MODEL_REPOSITORY": "owner/model",
        **given,
    }
    return subprocess.run(
        container["command"], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def is_waiting(rendered: Rendered, model: Path, repository: str) -> bool:
    """Whether the init container's condition still does not hold."""
    command = copy.deepcopy(wait_of(rendered, "decode")["command"])
    command[-1] = command[-1].replace("sleep 5", "exit 7")
    environment = {"BATON_MODEL": str(model), "MODEL_REPOSITORY": repository, "MODEL_REVISION": "main"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in {0, 7}, done.stderr
    return done.returncode == 7


def test_a_directory_of_another_model_fails_the_job_at_once_and_pods_do_not_take_it(
    scaled: Rendered, tmp_path: Path
) -> None:
    model = tmp_path / "models" / "main" / "model"
    with hub({"config.json": b"{}", "model.safetensors": b"weights"}) as running:
        first = download(scaled, tmp_path, running.endpoint)
        other = download(scaled, tmp_path, running.endpoint, MODEL_REPOSITORY="owner/other")
    assert first.returncode == 0, first.stderr
    assert (other.returncode, other.stdout) == (3, "")
    assert f"{model} is owner/model@main, not owner/other@main" in other.stderr
    (rule,) = scaled.job()["spec"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]) == ("FailJob", {"operator": "In", "values": [other.returncode]})
    # Kubernetes accepts a podFailurePolicy with this policy alone.
    assert scaled.job()["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    assert not is_waiting(scaled, model, "owner/model")
    assert is_waiting(scaled, model, "owner/other")


def test_a_directory_that_no_job_filled_fails_the_job(scaled: Rendered, tmp_path: Path) -> None:
    (tmp_path / "models" / "main" / "model").mkdir(parents=True)
    done = download(scaled, tmp_path, "http://127.0.0.1:9")
    assert done.returncode == 3
    assert "of an unknown source" in done.stderr


def test_what_was_left_of_another_models_download_is_not_mixed_in(scaled: Rendered, tmp_path: Path) -> None:
    partial = tmp_path / "models" / "main" / "model.partial"
    for left, source in (("old.safetensors", "owner/other@main"), ("kept.safetensors", "owner/model@main")):
        partial.mkdir(parents=True, exist_ok=True)
        (partial / left).write_bytes(b"left")
        (partial / ".baton-source").write_text(f"{source}\n")
        with hub({"config.json": b"{}"}) as running:
            assert download(scaled, tmp_path, running.endpoint).returncode == 0
        model = partial.with_suffix("")
        assert (model / left).exists() == (source == "owner/model@main")
        model.rename(tmp_path / left)


def test_a_job_that_another_one_overtook_leaves_the_model_alone(scaled: Rendered, tmp_path: Path) -> None:
    # The other Job finishes between this one's first look and its last step.
    model = tmp_path / "models" / "main" / "model"
    container = job_container(scaled)
    move = container["command"][-1].splitlines()[-1]
    assert move.startswith("mv ")
    for directory in (model, model.with_suffix(".partial")):
        directory.mkdir(parents=True)
        (directory / ".baton-source").write_text("owner/model@main\n")
    given = {"BATON_MODEL": str(model), "partial": f"{model}.partial", "PATH": os.environ["PATH"]}
    done = subprocess.run(["/bin/sh", "-ec", move], env=given, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert {path.name for path in model.iterdir()} == {".baton-source"}


@pytest.mark.parametrize("name", ["base", "nvidia", "scaled", "by_chart"])
def test_a_rollout_has_the_time_that_its_pods_may_take(request: pytest.FixtureRequest, name: str) -> None:
    rendered: Rendered = request.getfixturevalue(name)
    download_s = 7200 if rendered.of_kind("Job") else 0
    for role in ROLES:
        spec = rendered.deployment(role)["spec"]
        probe = rendered.container(role)["startupProbe"]
        needed = probe["failureThreshold"] * probe["periodSeconds"] + download_s
        # Kubernetes' default, for the image and for a host.
        assert spec["progressDeadlineSeconds"] >= 600 + needed + rendered.pod(role)["terminationGracePeriodSeconds"]


def test_pods_that_are_not_ready_never_keep_a_host_from_being_drained(
    deployed: Rendered, helm: Helm, cpu_demo: Rendered, tmp_path: Path
) -> None:
    pool = KUSTOMIZE / "components" / "inference-pool"
    pooled = helm.release(values_of("cpu-demo"), {"inferencePool": {"enabled": True}}).rendered
    budgets = [
        item
        for rendered in (deployed, cpu_demo, pooled, render_with(tmp_path, OVERLAYS / "cpu-demo", pool))
        for item in rendered.of_kind("PodDisruptionBudget")
    ]
    assert len(budgets) == 3 + 3 + 4 + 4
    assert {item["spec"]["unhealthyPodEvictionPolicy"] for item in budgets} == {"AlwaysAllow"}


def test_gateways_drain_as_long_as_the_longest_request(deployed: Rendered, base: Rendered) -> None:
    for rendered in (deployed, base):
        drain_s = float(rendered.settings("gateway")["drain_grace_s"])
        assert drain_s >= LONGEST_REQUEST_S
        before_s = rendered.container("gateway")["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert rendered.pod("gateway")["terminationGracePeriodSeconds"] >= before_s + drain_s + 10


def test_the_drain_is_the_one_value_that_grace_periods_follow(helm: Helm) -> None:
    for role, before in (("gateway", 10), ("prefill", 0), ("decode", 0)):
        for drain in (700, 1800.5):
            values: Values = {"insecure": True, role: {"settings": {"BATON_DRAIN_GRACE_S": drain}}}
            found = helm.release(values).rendered
            assert found.settings(role)["drain_grace_s"] == str(drain)
            assert found.pod(role)["terminationGracePeriodSeconds"] == -(-drain // 1) + before + 15
    longer: Values = {"insecure": True, "decode": {"terminationGracePeriodSeconds": 900}}
    assert helm.release(longer).rendered.pod("decode")["terminationGracePeriodSeconds"] == 900


@pytest.mark.parametrize("settings", [{"BATON_REQUEST_TIMEOUT_S": 1800}, {"BATON_DRAIN_GRACE_S": 120}])
def test_a_gateway_that_would_end_before_its_requests_is_refused(helm: Helm, settings: Values) -> None:
    with pytest.raises(Refused, match=r"gateway\.settings\.BATON_DRAIN_GRACE_S is .* use (1800|600) or more"):
        helm.release({"insecure": True, "gateway": {"settings": settings}})
    both = {"BATON_REQUEST_TIMEOUT_S": 100, "BATON_DRAIN_GRACE_S": 120}
    assert helm.release({"insecure": True, "gateway": {"settings": both}}).complaints == ()


def test_autoscalers_accept_the_longest_drain(helm: Helm) -> None:
    drain: Values = {"gateway": {"settings": {"BATON_DRAIN_GRACE_S": 7200}}}
    found = helm.release(values_of("nvidia", "autoscaled"), drain).rendered
    (policy,) = found.find("HorizontalPodAutoscaler", "baton-gateway")["spec"]["behavior"]["scaleDown"]["policies"]
    assert policy["periodSeconds"] == 1800  # Kubernetes' limit


def updates_of(rendered: Rendered, kind: str) -> dict[str, Manifest]:
    """How each node role's pods are replaced."""
    if kind == "Deployment":
        return {role: rendered.deployment(role)["spec"]["strategy"]["rollingUpdate"] for role in NODE_ROLES}
    if kind == "LeaderWorkerSet":
        specs = {item["metadata"]["labels"]["app.kubernetes.io/component"]: item for item in rendered.of_kind(kind)}
        return {role: specs[role]["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"] for role in NODE_ROLES}
    (one,) = rendered.of_kind(kind)
    return {
        item["name"]: item["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"] for item in one["spec"]["roles"]
    }


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Deployment", "nvidia"),
        ("LeaderWorkerSet", "leader-worker-set"),
        ("DisaggregatedSet", "disaggregated-set"),
    ],
)
def test_decode_nodes_may_be_replaced_in_place(helm: Helm, tmp_path: Path, kind: str, name: str) -> None:
    values = values_of("nvidia", *([] if kind == "Deployment" else [name]))
    usual = helm.release(values).rendered
    assert updates_of(usual, kind)["decode"] == {"maxSurge": 1, "maxUnavailable": 0}
    full: Values = {"decode": {"rollout": IN_PLACE}, "prefill": {"rollout": {"maxUnavailable": "25%"}}}
    assert updates_of(helm.release(values, full).rendered, kind) == {
        "decode": IN_PLACE,
        "prefill": {"maxSurge": 0, "maxUnavailable": "25%"},
    }
    base = OVERLAYS / ("nvidia" if kind == "Deployment" else f"nvidia-{name}")
    in_place = render_with(tmp_path, base, KUSTOMIZE / "components" / "replace-in-place")
    assert updates_of(in_place, kind)["decode"] == IN_PLACE


@pytest.mark.parametrize("none", [0, "0%"])
def test_a_rollout_that_could_replace_no_pod_is_refused(helm: Helm, none: object) -> None:
    with pytest.raises(Refused, match=r"decode\.rollout"):
        helm.release({"insecure": True, "decode": {"rollout": {"maxSurge": none}}})
