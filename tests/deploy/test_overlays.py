"""The purpose of each overlay, and its differences from the base."""

from pathlib import PurePosixPath

import yaml

from baton.security.roles import Role, dns_names_of, uri_of
from baton.settings.node_config import NodeSettings
from tests.deploy.manifests import KUSTOMIZE, NODE_ROLES, ROLES, SETTINGS, Rendered


def test_the_base_serves_the_demo_model_in_the_images(base: Rendered) -> None:
    for role, pod in base.pods():
        assert "model" not in base.settings(role)
        assert {volume["name"] for volume in pod["volumes"]} <= {"tmp", "shm"}


def test_the_base_has_no_single_point_of_failure(base: Rendered) -> None:
    assert [base.deployment(role)["spec"]["replicas"] for role in ROLES] == [2, 2, 2]
    assert {item["spec"]["maxUnavailable"] for item in base.of_kind("PodDisruptionBudget")} == {1}


def test_the_cpu_demo_requests_few_resources(cpu_demo: Rendered) -> None:
    millicores = 0
    for role in ROLES:
        request = cpu_demo.container(role)["resources"]["requests"]["cpu"]
        millicores += int(request.removesuffix("m")) * cpu_demo.deployment(role)["spec"]["replicas"]
    assert millicores <= 1500


def test_the_cpu_demo_shows_that_nodes_may_differ(cpu_demo: Rendered) -> None:
    prefill, decode = (SETTINGS[role].model_validate(cpu_demo.settings(role)) for role in NODE_ROLES)
    assert isinstance(prefill, NodeSettings)
    assert isinstance(decode, NodeSettings)
    assert prefill.kv_cache_layout != decode.kv_cache_layout
    assert prefill.block_size != decode.block_size


def test_the_cpu_demo_needs_no_device_and_no_volume(cpu_demo: Rendered) -> None:
    assert not cpu_demo.of_kind("PersistentVolumeClaim")
    for role in NODE_ROLES:
        assert set(cpu_demo.container(role)["resources"]["limits"]) == {"memory"}
        assert cpu_demo.settings(role).get("device", "cpu") == "cpu"


def test_nvidia_nodes_have_a_gpu_each_and_gateways_none(nvidia: Rendered) -> None:
    for role in NODE_ROLES:
        assert nvidia.container(role)["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert nvidia.settings(role)["device"] == "cuda"
        assert nvidia.container(role)["image"].startswith(f"baton-{role}-cuda:")
    assert "nvidia.com/gpu" not in nvidia.container("gateway")["resources"]["limits"]


def test_nvidia_serves_one_model_from_a_volume_in_every_pod(nvidia: Rendered) -> None:
    (claim,) = nvidia.of_kind("PersistentVolumeClaim")
    for role, pod in nvidia.pods():
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "model"]
        assert volume["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"], "readOnly": True}
        (mount,) = [mount for mount in nvidia.container(role)["volumeMounts"] if mount["name"] == "model"]
        assert mount["readOnly"] is True
        assert nvidia.settings(role)["model"].startswith(f"{mount['mountPath']}/")
    assert len({nvidia.settings(role)["model"] for role in ROLES}) == 1


def test_nvidia_nodes_find_their_sizes_themselves_and_have_time_to_load(base: Rendered, nvidia: Rendered) -> None:
    for role in NODE_ROLES:
        sizes = {"kv_cache_mib", "max_batch_tokens", "max_batch_requests", "segment_mib"}
        assert not sizes & nvidia.settings(role).keys()
        probe, usual = (rendered.container(role)["startupProbe"] for rendered in (nvidia, base))
        assert probe["failureThreshold"] * probe["periodSeconds"] >= 3600
        assert probe["grpc"] == usual["grpc"]


def test_rdma_adds_an_adapter_and_a_ucx_that_supports_it(nvidia: Rendered, rdma: Rendered) -> None:
    for role in NODE_ROLES:
        before, after = (rendered.container(role) for rendered in (nvidia, rdma))
        assert after["resources"]["limits"] == before["resources"]["limits"] | {"rdma/hca": 1}
        assert rdma.environment(role) == nvidia.environment(role) | {"RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY": "true"}
    assert rdma.deployment("gateway") == nvidia.deployment("gateway")


def test_the_base_alone_has_neither_certificates_nor_permission_to_go_without(base: Rendered) -> None:
    for role in ROLES:
        assert not {"tls_cert", "insecure"} & base.settings(role).keys()


def test_the_cpu_demo_goes_without_tls_on_purpose(cpu_demo: Rendered) -> None:
    assert {cpu_demo.settings(role)["insecure"] for role in ROLES} == {"true"}


def test_nvidia_mounts_every_file_of_its_certificates_and_keys(nvidia: Rendered) -> None:
    for role, pod in nvidia.pods():
        settings = nvidia.settings(role)
        assert "insecure" not in settings
        secrets = {volume["name"]: volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
        mounted = {
            mount["mountPath"]: secrets[mount["name"]]
            for mount in nvidia.container(role)["volumeMounts"]
            if mount["name"] in secrets
        }
        named = [name for name in settings if name.startswith(("tls_", "client_tls_")) or name == "api_keys"]
        assert len(named) == (6 if role == "gateway" else 3)
        for name in named:
            folder = str(PurePosixPath(settings[name]).parent)
            assert mounted[folder] == {"tls": f"baton-{role}-tls"}.get(
                PurePosixPath(folder).name, f"baton-{PurePosixPath(folder).name}"
            )


def test_the_certificate_that_clients_see_has_every_name_of_every_service_they_call(base: Rendered) -> None:
    file = KUSTOMIZE / "components" / "cert-manager" / "certificates.yaml"
    made = {item["metadata"]["name"]: item["spec"] for item in yaml.safe_load_all(file.read_text())}
    names = {service["metadata"]["name"] for service in base.of_kind("Service")}
    called = {name for name in names if name.startswith("baton-gateway")}
    assert len(called) == 2
    suffixes = ("", ".baton", ".baton.svc", ".baton.svc.cluster.local")
    assert {name + suffix for name in called for suffix in suffixes} <= set(made["baton-client"]["dnsNames"])


def test_cert_manager_makes_the_certificates_that_processes_expect() -> None:
    file = KUSTOMIZE / "components" / "cert-manager" / "certificates.yaml"
    made = {item["metadata"]["name"]: item["spec"] for item in yaml.safe_load_all(file.read_text())}
    for role in set(Role) - {Role.NODE}:  # pods keep their role: a Deployment has one
        certificate = made[f"baton-{role}"]
        assert certificate["secretName"] == f"baton-{role}-tls"
        assert certificate["uris"] == [uri_of(role)]
        assert certificate["dnsNames"] == list(dns_names_of(role))
        assert {"server auth", "client auth"} <= set(certificate["usages"])
    assert "uris" not in made["baton-client"]
    assert "client auth" not in made["baton-client"]["usages"]
