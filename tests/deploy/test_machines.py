"""Hosts of other kinds: without the GPU operator, with arm64, with IPv6 alone; a compile cache that outlives pods."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from baton.settings.node_config import DecodeSettings
from tests.deploy.chart import Helm, Refused, values_of
from tests.deploy.images import Stage, environment_of, instructions, lineage, read_stages
from tests.deploy.manifests import KUSTOMIZE, NODE_ROLES, NVIDIA, ROLES, ROOT, Rendered, render_with

COMPONENTS = ("model-download", "compile-cache", "arm64")
GPU_TARGETS = ("prefill-cuda", "decode-cuda", "prefill-rdma", "decode-rdma")

# Puts a kernel into Triton's cache, or reads it; prints where it lies.
USE_CACHE = """
import sys
from triton.runtime.cache import FileCacheManager
cache = FileCacheManager("a" * 64)
if sys.argv[1] == "put":
    cache.put(b"kernel", "kernel.cubin")
print(cache.get_file("kernel.cubin"))
"""


@pytest.fixture(scope="module")
def stages(dockerfile: Path) -> dict[str, Stage]:
    return read_stages(dockerfile)


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    """The NVIDIA overlay for arm64, with a compile cache."""
    components = (KUSTOMIZE / "components" / name for name in COMPONENTS)
    return render_with(tmp_path_factory.mktemp("machines"), NVIDIA, *components)


def test_a_gpu_host_needs_no_label_of_an_operator(nvidia: Rendered) -> None:
    for role in NODE_ROLES:
        assert "nodeSelector" not in nvidia.pod(role)
        assert nvidia.container(role)["resources"]["limits"]["nvidia.com/gpu"] == 1


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_the_loader_finds_a_driver_that_gke_mounts(stages: dict[str, Stage], target: str) -> None:
    environment = environment_of(stages, target)
    assert "/usr/local/nvidia/lib64" in environment["LD_LIBRARY_PATH"].split(":")
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"


def test_every_pod_stays_on_hosts_of_the_images_architecture(everywhere: Rendered) -> None:
    (job,) = everywhere.of_kind("Job")
    for pod in (job["spec"]["template"]["spec"], *(pod for _, pod in everywhere.pods())):
        assert pod["nodeSelector"] == {"kubernetes.io/arch": "arm64"}


def test_a_role_may_have_another_architecture_than_the_rest(helm: Helm) -> None:
    labels = {"kubernetes.io/arch": "arm64", "rack": "7"}
    values = {"insecure": True, "images": {"architecture": "amd64"}, "node": {"nodeSelector": labels}}
    found = helm.release(values).rendered
    assert found.pod("gateway")["nodeSelector"] == {"kubernetes.io/arch": "amd64"}
    for role in NODE_ROLES:
        assert found.pod(role)["nodeSelector"] == labels
    assert not any("nodeSelector" in pod for _, pod in helm.release({"insecure": True}).rendered.pods())
    with pytest.raises(Refused, match="architecture"):
        helm.release({"insecure": True, "images": {"architecture": "aarch64"}})


def test_the_dockerfile_names_no_architecture(dockerfile: Path) -> None:
    code = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE)
    assert re.findall(r"x86_64|amd64|aarch64|arm64|--platform", code) == []


@pytest.mark.parametrize("role", ROLES)
def test_ports_take_both_families_and_an_address_of_either_is_advertised(base: Rendered, role: str) -> None:
    settings = base.settings(role)
    listens = {name: value for name, value in settings.items() if name == "listen" or name.endswith("_listen")}
    assert {value.rpartition(":")[0] for value in listens.values()} == {"[::]"}
    raw = base.environment_of(base.container(role), {"status.podIP": "fd00::7", "metadata.name": "p"})
    port = base.ports(role)["grpc"]
    assert DecodeSettings(advertise=raw["BATON_ADVERTISE"]).advertise == f"[fd00::7]:{port}"


def test_compiled_kernels_outlive_a_pod_on_a_volume_of_all_nodes(everywhere: Rendered) -> None:
    claim = everywhere.find("PersistentVolumeClaim", "baton-compile-cache")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for role in NODE_ROLES:
        pod, container = everywhere.pod(role), everywhere.container(role)
        (volume,) = [item for item in pod["volumes"] if item["name"] == "compile-cache"]
        assert volume["persistentVolumeClaim"] == {"claimName": "baton-compile-cache"}
        (mount,) = [item for item in container["volumeMounts"] if item["name"] == "compile-cache"]
        assert everywhere.environment(role)["TRITON_CACHE_DIR"].startswith(f"{mount['mountPath']}/")
        # Without it the volume belongs to root, and the process is another user.
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert "compile-cache" not in str(everywhere.pod("gateway"))


def test_triton_keeps_kernels_where_the_volume_is(everywhere: Rendered, tmp_path: Path) -> None:
    place = tmp_path / everywhere.environment("decode")["TRITON_CACHE_DIR"].lstrip("/")

    def use(verb: str) -> str:
        environment = os.environ | {"TRITON_CACHE_DIR": str(place), "HOME": str(tmp_path / "a new pod")}
        command = [sys.executable, "-c", USE_CACHE, verb]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
        return done.stdout.strip()

    made = use("put")
    assert Path(made).is_relative_to(place)
    assert use("get") == made
    assert not (tmp_path / "a new pod").exists()


def test_a_claim_that_exists_may_be_the_compile_cache(helm: Helm) -> None:
    cache = {"enabled": True, "existingClaim": "kernels"}
    found = helm.release(values_of("nvidia"), {"node": {"compileCache": cache}}).rendered
    assert {item["metadata"]["name"] for item in found.of_kind("PersistentVolumeClaim")} == {"baton-model"}
    assert "{'claimName': 'kernels'}" in str(found.pod("decode")["volumes"])


@pytest.mark.parametrize("target", ["gateway", "prefill", "decode", *GPU_TARGETS])
def test_a_change_of_batons_code_changes_a_small_layer_alone(stages: dict[str, Stage], target: str) -> None:
    copies = [text.split() for keyword, text in instructions(stages, target) if keyword == "COPY"]
    sources = {source.removeprefix("--from="): (of, to) for source, of, to in copies}
    assert sources["baton"] == ("/layer", "/opt/baton")
    (dependencies,) = [name for name in sources if name.endswith("-dependencies")]
    assert sources[dependencies] == ("/opt/baton", "/opt/baton")
    # What those layers are made of: versions, and nothing of the tree.
    taken = {
        text for stage in lineage(stages, dependencies) for keyword, text in stage.instructions if keyword == "COPY"
    }
    assert taken <= {"constraints.txt ./", *(f"--from=lists /build/{name}.txt ./" for name in ("gateway", "node"))}


def test_the_image_of_endpoint_slices_has_the_extra(stages: dict[str, Stage]) -> None:
    copies = [text for keyword, text in instructions(stages, "gateway-kubernetes") if keyword == "COPY"]
    assert copies[-1] == "--from=kubernetes-dependencies /layer /opt/baton"


def test_ucx_for_rdma_has_the_version_of_the_wheel_and_verbs(stages: dict[str, Stage]) -> None:
    (build,) = [text for _, text in stages["ucx"].instructions if "configure-release" in text]
    assert "sed -n 's/^libucx-cu13==//p' constraints.txt" in build
    assert {"--with-verbs", "--with-rdmacm", "--with-cuda=/usr/local/cuda", "--enable-mt"} <= set(build.split())
    assert len(re.findall(r"^libucx-cu13==[\d.]+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)) == 1
    for target in ("prefill-rdma", "decode-rdma"):
        environment = environment_of(stages, target)
        assert environment["RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"] == "true"
        assert environment["LD_LIBRARY_PATH"].split(":")[0] == "/opt/ucx/lib"


def test_make_image_builds_every_target_and_refuses_others(stages: dict[str, Stage]) -> None:
    done = subprocess.run(
        [ROOT / ".ci" / "image", "none", ""], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2
    (line,) = re.findall(r"^targets: (.*)$", done.stderr, re.MULTILINE)
    with_a_process = {name for name in stages if "EXPOSE" in dict(instructions(stages, name))}
    assert {*line.split()} == with_a_process | {"all"}
