"""Where a model comes from: claims, OCI images, buckets, and the way to them from a site without the internet."""

import copy
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.chart import Helm, Refused, Values, merged, values_of
from tests.deploy.manifests import (
    KUSTOMIZE,
    NODE_ROLES,
    NVIDIA,
    OVERLAYS,
    ROLES,
    Manifest,
    Rendered,
    render_with,
    validate,
)
from tests.deploy.test_chart import comparable, differences

COMPONENTS = KUSTOMIZE / "components"
DIGEST = f"sha256:{0:064}"
IMAGE = f"registry.example.com/models/qwen3-8b@{DIGEST}"


# Components that stand in place of the claim, and the values that are the same as each.
SOURCES: dict[str, Values] = {
    "model-image": {"image": {"reference": IMAGE, "path": "models"}},
    "model-image-copy": {"image": {"reference": IMAGE, "path": "models", "by": "copy"}},
    "model-s3": {
        "s3": {
            "uri": "s3://models/Qwen3-8B",
            "image": f"registry.example.com/aws-cli@{DIGEST}",
            "region": "eu-central-1",
            "secret": "baton-s3",
        }
    },
}
AIR_GAPPED: Values = {
    "images": {"registry": "registry.example.com", "pullSecrets": ["registry"]},
    "model": {"download": {"endpoint": "https://hub.example.com"}, "egressPorts": [443, 3128]},
    "proxy": {
        "http": "http://proxy.example.com:3128",
        "https": "http://proxy.example.com:3128",
        "except": ".svc,.example.com",
    },
}


def of_source(helm: Helm, name: str, **more: Any) -> Rendered:
    """The NVIDIA cluster with a model of this source, by the chart."""
    model = merged([{"directory": "Qwen3-8B"}, SOURCES[name], more])
    return helm.release(values_of("nvidia"), {"model": model}).rendered


@pytest.fixture(scope="module", params=SOURCES)
def source(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


def claim_of(helm: Helm, **volume: object) -> Manifest:
    (claim,) = helm.release({"insecure": True, "model": {"directory": "x", "volume": volume}}).rendered.of_kind(
        "PersistentVolumeClaim"
    )
    validate(claim)
    spec = claim["spec"]
    assert isinstance(spec, dict)
    return spec


def test_a_claim_has_the_default_class_or_none_or_a_named_one(helm: Helm) -> None:
    assert "storageClassName" not in claim_of(helm)
    assert claim_of(helm, storageClassName="-")["storageClassName"] == ""
    assert claim_of(helm, storageClassName="fast")["storageClassName"] == "fast"
    assert "volumeName" not in claim_of(helm)
    bound = claim_of(helm, storageClassName="-", volumeName="models-1", accessModes=["ReadOnlyMany", "ReadWriteMany"])
    assert (bound["volumeName"], bound["accessModes"]) == ("models-1", ["ReadOnlyMany", "ReadWriteMany"])


def test_a_claim_that_nobody_fills_binds_to_a_volume_that_exists(nvidia: Rendered, helm: Helm) -> None:
    for rendered in (nvidia, helm.release(values_of("nvidia")).rendered):
        (claim,) = rendered.of_kind("PersistentVolumeClaim")
        assert (claim["spec"]["storageClassName"], claim["spec"]["accessModes"]) == ("", ["ReadOnlyMany"])


def test_a_claim_that_the_download_fills_gets_a_new_volume(scaled: Rendered, helm: Helm) -> None:
    for rendered in (scaled, helm.release(values_of("nvidia", "autoscaled")).rendered):
        (claim,) = rendered.of_kind("PersistentVolumeClaim")
        assert "storageClassName" not in claim["spec"]
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("overlay", ["base", "overlays/nvidia"])
def test_a_source_takes_the_place_of_the_claim(source: str, overlay: str, tmp_path: Path) -> None:
    found = render_with(tmp_path, KUSTOMIZE / overlay, COMPONENTS / source)
    assert not found.of_kind("PersistentVolumeClaim")
    for item in found.objects:
        validate(item)
    for role, pod in found.pods():
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "model"]
        assert "persistentVolumeClaim" not in volume
        (mount,) = [mount for mount in found.container(role)["volumeMounts"] if mount["name"] == "model"]
        assert mount["readOnly"] is True
        assert found.settings(role)["model"].startswith(mount["mountPath"])


def test_chart_and_kustomization_have_the_same_sources(helm: Helm, source: str, tmp_path: Path) -> None:
    ours = comparable(of_source(helm, source))
    theirs = comparable(render_with(tmp_path, NVIDIA, COMPONENTS / source))
    del theirs["Namespace baton"]
    assert set(ours) == set(theirs)
    for name, item in ours.items():
        assert list(differences(item, theirs[name], name)) == []


def test_an_image_volume_is_the_directory_of_the_model(helm: Helm) -> None:
    found = of_source(helm, "model-image", image={"path": "", "pullPolicy": "IfNotPresent"})
    for role, pod in found.pods():
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "model"]
        assert volume["image"] == {"reference": IMAGE, "pullPolicy": "IfNotPresent"}
        (mount,) = [mount for mount in found.container(role)["volumeMounts"] if mount["name"] == "model"]
        assert mount == {"name": "model", "mountPath": found.settings(role)["model"], "readOnly": True}


@pytest.mark.parametrize("role", ROLES)
def test_an_images_files_are_copied_and_gateways_get_no_weights(helm: Helm, tmp_path: Path, role: str) -> None:
    files = {"config.json": "{}", "model.safetensors": "weights", "1_Pooling/config.json": "{}"}
    for path, text in files.items():
        (tmp_path / "image" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "image" / path).write_text(text)
    (container,) = of_source(helm, "model-image-copy").pod(role)["initContainers"]
    model = tmp_path / "models" / "Qwen3-8B"
    given = {"MODEL_FILES": str(tmp_path / "image"), "BATON_MODEL": str(model), "PATH": os.defpath}
    for _ in range(2):  # a pod whose sandbox is made again runs it again
        subprocess.run(container["command"], env=given, timeout=60, check=True)
    copied = {str(path.relative_to(model)) for path in model.rglob("*") if path.is_file()}
    assert copied == set(files) - ({"model.safetensors"} if role == "gateway" else set())


def test_a_bucket_is_copied_with_the_secret_that_the_values_name(helm: Helm) -> None:
    found = of_source(helm, "model-s3", s3={"endpoint": "https://minio.example.com:9000"}, egressPorts=[9000])
    for role, pod in found.pods():
        (container,) = pod["initContainers"]
        weights = ["--exclude", "*.safetensors"] if role == "gateway" else []
        command = ["aws", "s3", "sync", "--no-progress", "s3://models/Qwen3-8B/", "$(BATON_MODEL)", *weights]
        assert container["command"] == command
        assert container["envFrom"] == [{"secretRef": {"name": "baton-s3"}}]
        given = {item["name"]: item["value"] for item in container["env"]}
        assert given["BATON_MODEL"] == found.settings(role)["model"]
        assert given["AWS_ENDPOINT_URL_S3"] == "https://minio.example.com:9000"
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/models", given["HOME"]} <= mounted  # all that it writes: the root is read-only
    rules = found.find("NetworkPolicy", "baton-model")["spec"]["egress"]
    assert {"protocol": "TCP", "port": 9000} in rules[0]["ports"]
    # The rights of the pods' ServiceAccounts.
    (container,) = of_source(helm, "model-s3", s3={"secret": ""}).pod("decode")["initContainers"]
    assert "envFrom" not in container


def test_a_pod_that_copies_goes_to_a_host_with_room(helm: Helm) -> None:
    for name in ("model-image-copy", "model-s3"):
        found = of_source(helm, name, podStorage="40Gi")
        for role, pod in found.pods():
            size = "1Gi" if role == "gateway" else "40Gi"
            (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "model"]
            assert volume["emptyDir"] == {"sizeLimit": size}
            (container,) = pod["initContainers"]
            assert container["resources"]["requests"]["ephemeral-storage"] == size


def test_init_containers_meet_the_restricted_profile(helm: Helm, source: str) -> None:
    for _, pod in of_source(helm, source).pods():
        for container in pod.get("initContainers", ()):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_a_model_of_another_source_rolls_the_pods(helm: Helm, source: str) -> None:
    other = {"image": {"reference": f"{IMAGE[:-1]}1"}, "s3": {"uri": "s3://models/other"}}
    (changed,) = (key for key in SOURCES[source])
    before, after = of_source(helm, source), of_source(helm, source, **{changed: other[changed]})
    for role in ROLES:
        assert before.deployment(role)["spec"]["template"] != after.deployment(role)["spec"]["template"]


def test_an_air_gapped_site_is_the_same_by_chart_and_kustomization(helm: Helm, tmp_path: Path) -> None:
    chart = helm.release(values_of("nvidia", "autoscaled"), AIR_GAPPED).rendered
    kustomization = render_with(tmp_path, OVERLAYS / "nvidia-autoscaled", COMPONENTS / "air-gapped")
    ours, theirs = comparable(chart), comparable(kustomization)
    del theirs["Namespace baton"]
    for side in (ours, theirs):
        (container,) = side["Job baton-model-download"]["spec"]["template"]["spec"]["containers"]
        container["env"].sort(key=lambda item: item["name"])
        side["NetworkPolicy baton-model-download"]["spec"]["egress"][0]["ports"].sort(
            key=lambda port: (port["port"], port["protocol"])
        )
    for name, item in ours.items():
        assert list(differences(item, theirs[name], name)) == []


def test_every_image_of_an_air_gapped_site_is_of_its_registry(helm: Helm) -> None:
    chart = helm.release(values_of("nvidia", "autoscaled"), AIR_GAPPED).rendered
    pods = [chart.job()["spec"]["template"]["spec"], *(pod for _, pod in chart.pods())]
    for pod in pods:
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert container["image"].startswith("registry.example.com/baton-")


def test_what_fetches_a_model_goes_by_the_proxy_and_processes_do_not(helm: Helm) -> None:
    proxy = {"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"}
    downloaded = helm.release(values_of("nvidia", "autoscaled"), AIR_GAPPED).rendered
    (job,) = downloaded.job()["spec"]["template"]["spec"]["containers"]
    assert proxy | {"HF_ENDPOINT"} <= {item["name"] for item in job["env"]}
    gap: Values = {"proxy": AIR_GAPPED["proxy"], "model": {"directory": "x", **SOURCES["model-s3"]}}
    copied = helm.release(values_of("nvidia"), gap).rendered
    for role, pod in copied.pods():
        (container,) = pod["initContainers"]
        assert proxy <= {item["name"] for item in container["env"]}
        # gRPC reads these variables, too.
        for rendered in (copied, downloaded):
            assert not proxy & set(rendered.environment(role))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"image": {"reference": IMAGE}}, "model.image.reference needs model.directory"),
        ({"directory": "x", "image": {"reference": IMAGE}, "s3": {"uri": "s3://b/x"}}, "are set together"),
        (
            {"directory": "x", "image": {"reference": IMAGE}, "download": {"enabled": True, "repository": "a/b"}},
            "are set together",
        ),
        (
            {"directory": "x", "s3": {"uri": "s3://b/x", "image": "aws"}, "volume": {"existingClaim": "ours"}},
            "model.s3.uri and model.volume.existingClaim",
        ),
        ({"directory": "x", "s3": {"uri": "s3://b/x"}}, "needs model.s3.image"),
        ({"directory": "x", "s3": {"uri": "https://b/x"}}, "uri"),
        ({"directory": "x", "image": {"reference": IMAGE, "by": "copy"}}, "needs model.image.path"),
        ({"directory": "x/../../etc"}, "directory"),
        ({"directory": "x/"}, "directory"),  # the download goes to a directory next to it, not in it
        ({"directory": "x", "download": {"revision": "../main"}}, "revision"),
        ({"directory": "x", "volume": {"storageClassName": "Fast"}}, "storageClassName"),
        ({"directory": "x", "volume": {"accessModes": ["ReadSometimes"]}}, "accessModes"),
        ({"directory": "x", "egressPorts": []}, "egressPorts"),
    ],
)
def test_wrong_sources_are_refused_by_name(helm: Helm, model: Values, reason: str) -> None:
    with pytest.raises(Refused, match=reason.replace(".", r"\.")):
        helm.release({"insecure": True, "model": model})


def test_a_component_says_what_the_base_says(source: str, tmp_path: Path) -> None:
    # A component may not change what it does not need to: containers keep everything but the model's mount.
    with_source = render_with(tmp_path, NVIDIA, COMPONENTS / source)
    (tmp_path / "usual").mkdir()
    usual = render_with(tmp_path / "usual", NVIDIA)
    for role in NODE_ROLES:
        ours, theirs = (copy.deepcopy(rendered.container(role)) for rendered in (with_source, usual))
        for container in (ours, theirs):
            for key in ("volumeMounts", "envFrom"):
                del container[key]
        assert ours == theirs
