"""Values that fit the chart to a cluster: what pods need, how clients get in, `helm test`, GitOps, a post-renderer."""

import json
import os
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.monitoring import dashboard
from tests.deploy.chart import CHART, Helm, Refused, Values, merged, values_of
from tests.deploy.manifests import NODE_ROLES, ROLES, ROOT, Manifest, Rendered, validate

EXAMPLES = ROOT / "examples" / "helm"
INSECURE: dict[str, Any] = {"insecure": True}
QUEUE = {"kueue.x-k8s.io/queue-name": "gpus"}
RACKS = [{"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}]


def workloads(rendered: Rendered) -> dict[str, tuple[Manifest, Manifest]]:
    """The workload of each role, and its pod template."""
    found: dict[str, tuple[Manifest, Manifest]] = {}
    for item in rendered.of_kind("Deployment"):
        found[item["metadata"]["labels"]["app.kubernetes.io/component"]] = (item, item["spec"]["template"])
    for item in rendered.of_kind("LeaderWorkerSet"):
        template = item["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        found[item["metadata"]["labels"]["app.kubernetes.io/component"]] = (item, template)
    for item in rendered.of_kind("DisaggregatedSet"):
        for role in item["spec"]["roles"]:
            found[role["name"]] = (item, role["spec"]["leaderWorkerTemplate"]["workerTemplate"])
    assert sorted(found) == sorted(ROLES)
    return found


def pod_of(rendered: Rendered, role: str) -> Manifest:
    _, template = workloads(rendered)[role]
    spec: Manifest = template["spec"]
    return spec


@pytest.mark.parametrize("kind", ["Deployment", "LeaderWorkerSet", "DisaggregatedSet"])
def test_a_queue_can_be_named_by_workloads_and_pods_of_every_kind(helm: Helm, kind: str) -> None:
    extra = {"workloadLabels": QUEUE, "workloadAnnotations": {"team": "llm"}, "podLabels": QUEUE}
    found = helm.release(INSECURE, {"node": {"kind": kind, "extra": extra}}).rendered
    for role, (workload, template) in workloads(found).items():
        is_node = role in NODE_ROLES
        assert (QUEUE.items() <= workload["metadata"]["labels"].items()) == is_node
        assert (workload["metadata"].get("annotations", {}).get("team") == "llm") == is_node
        assert (QUEUE.items() <= template["metadata"]["labels"].items()) == is_node
        validate(workload)


def test_the_role_wins_over_both_node_roles_and_they_over_all(helm: Helm) -> None:
    def named(scheduler: str) -> dict[str, Any]:
        return {"extra": {"podSpec": {"schedulerName": scheduler}}}

    everybody: Values = INSECURE | named("of-all")
    found = helm.release(everybody, {"node": named("of-nodes"), "decode": named("of-decode")}).rendered
    assert {role: pod_of(found, role)["schedulerName"] for role in ROLES} == {
        "gateway": "of-all",
        "prefill": "of-nodes",
        "decode": "of-decode",
    }


def test_maps_are_merged_and_an_empty_list_takes_away_the_one_above(helm: Helm) -> None:
    cache = {"volumes": [{"name": "cache", "emptyDir": {}}], "volumeMounts": [{"name": "cache", "mountPath": "/cache"}]}
    values: Values = {
        "extra": {"podLabels": {"team": "llm"}, "podSpec": {"topologySpreadConstraints": RACKS}},
        "node": {"extra": {**cache, "podLabels": {"tier": "node"}}},
        "decode": {"extra": {"volumes": [], "volumeMounts": [], "podSpec": {"topologySpreadConstraints": []}}},
    }
    found = helm.release(INSECURE, values).rendered
    labels = {role: template["metadata"]["labels"] for role, (_, template) in workloads(found).items()}
    assert [labels[role].get("team") for role in ROLES] == ["llm"] * 3
    assert [labels[role].get("tier") for role in ROLES] == [None, "node", "node"]
    names = {role: {item["name"] for item in pod_of(found, role)["volumes"]} for role in ROLES}
    assert {role for role in ROLES if "cache" in names[role]} == {"prefill"}
    assert {role: pod_of(found, role)["topologySpreadConstraints"] for role in ROLES} == {
        "gateway": RACKS,
        "prefill": RACKS,
        "decode": [],
    }


def test_a_pods_fields_win_over_the_charts_and_keep_what_they_do_not_name(helm: Helm) -> None:
    nodes = {"nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]}
    values: Values = {
        "extra": {
            "podSpec": {
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": nodes}},
                "dnsPolicy": "None",
                "dnsConfig": {"nameservers": ["10.0.0.10"], "options": [{"name": "ndots", "value": "2"}]},
                "securityContext": {"fsGroup": 1000680000, "supplementalGroups": [7]},
                "hostAliases": [{"ip": "10.1.1.1", "hostnames": ["hub"]}],
            },
            "containerSecurityContext": {"seLinuxOptions": {"type": "container_t"}},
            "podAnnotations": {"example.com/a": "b"},
            "envFrom": [{"secretRef": {"name": "proxies"}}],
            "initContainers": [{"name": "mine", "image": "mine:1"}],
        }
    }
    found = helm.release(values_of("nvidia", "autoscaled"), values).rendered
    for role, (workload, template) in workloads(found).items():
        pod = template["spec"]
        assert pod["dnsConfig"]["options"] == [{"name": "ndots", "value": "2"}]
        assert pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] == nodes
        assert ("podAffinity" in pod["affinity"]) == (role == "prefill")
        assert pod["securityContext"]["fsGroup"] == 1000680000
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        assert container["envFrom"][-1] == {"secretRef": {"name": "proxies"}}
        wait, mine = pod["initContainers"]
        for own in (container, wait):
            assert own["securityContext"]["seLinuxOptions"] == {"type": "container_t"}
            assert own["securityContext"]["readOnlyRootFilesystem"] is True
        assert mine == {"name": "mine", "image": "mine:1"}
        assert {"checksum/settings", "example.com/a"} <= template["metadata"]["annotations"].keys()
        validate(workload)


def test_a_volume_of_the_charts_name_replaces_it(helm: Helm) -> None:
    tmp = {"name": "tmp", "ephemeral": {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteOnce"]}}}}
    found = helm.release(INSECURE, {"extra": {"volumes": [tmp]}}).rendered
    for role in ROLES:
        assert [volume for volume in pod_of(found, role)["volumes"] if volume["name"] == "tmp"] == [tmp]


def test_values_that_are_left_empty_change_nothing(helm: Helm) -> None:
    sets: Values = INSECURE | {"node": {"kind": "LeaderWorkerSet"}}
    for usual in (INSECURE, sets):
        empty: Values = {"extra": None, "node": {"extra": None}, "gateway": {"extra": None}}
        assert helm.release(usual, empty).rendered == helm.release(usual).rendered


def test_service_accounts_take_labels_and_annotations_of_their_role(helm: Helm) -> None:
    annotations = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/models"}
    extra = {"serviceAccountAnnotations": annotations, "serviceAccountLabels": {"azure.workload.identity/use": "true"}}
    found = helm.release(INSECURE, {"prefill": {"extra": extra}}).rendered
    for role in ROLES:
        account = found.find("ServiceAccount", f"baton-{role}")["metadata"]
        assert account.get("annotations") == (annotations if role == "prefill" else None)
        assert ("azure.workload.identity/use" in account["labels"]) == (role == "prefill")


def test_nodes_report_the_zone_and_the_host_of_their_pod_or_what_values_say(helm: Helm) -> None:
    found = helm.release({"insecure": True}).rendered
    zone = {"metadata.labels['topology.kubernetes.io/zone']": "eu-1a"}
    for role in NODE_ROLES:
        assert found.environment_of(found.container(role), zone)["BATON_TOPOLOGY"] == "zone=eu-1a,host=the-host"
    assert "topology" not in found.settings("gateway")
    other = helm.release({"insecure": True, "topology": "rack=7,host=$(NODE_NAME)"}).rendered
    assert other.settings("decode")["topology"] == "rack=7,host=the-host"


def test_the_gateways_service_can_have_an_address_outside(helm: Helm) -> None:
    service = {
        "type": "LoadBalancer",
        "annotations": {"networking.gke.io/load-balancer-type": "Internal"},
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
        "externalTrafficPolicy": "Local",
    }
    release = helm.release(INSECURE, {"gateway": {"service": service}})
    found = release.rendered.find("Service", "baton-gateway")
    validate(found)
    assert found["spec"]["type"] == "LoadBalancer"
    assert found["spec"]["loadBalancerSourceRanges"] == ["10.0.0.0/8"]
    assert found["metadata"]["annotations"] == service["annotations"]
    others = [item for item in release.rendered.of_kind("Service") if item["metadata"]["name"] != "baton-gateway"]
    assert {item["spec"]["clusterIP"] for item in others} == {"None"}
    assert "get service baton-gateway" in release.notes


def test_an_ingress_leads_to_a_port_of_the_gateways_service(helm: Helm) -> None:
    values = {"ingress": {"enabled": True, "host": "llm.example.com", "className": "nginx", "tlsSecret": "llm-tls"}}
    release = helm.release(INSECURE, values)
    ingress = release.rendered.find("Ingress", "baton-gateway")
    validate(ingress)
    backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    service = release.rendered.find("Service", backend["name"])["spec"]
    assert backend["port"]["name"] in {port["name"] for port in service["ports"]}
    assert "https://llm.example.com/v1" in release.notes


@pytest.mark.parametrize("is_insecure", [True, False])
def test_routes_lead_to_the_ports_of_the_gateways_service_over_tls_where_it_speaks_tls(
    helm: Helm, is_insecure: bool
) -> None:
    routes = {
        "enabled": True,
        "parentRefs": [{"name": "public", "namespace": "gateways"}],
        "hostnames": ["llm.example.com"],
        "grpcHostnames": ["grpc.llm.example.com"],
        "caConfigMap": "baton-ca",
    }
    values: Values = {"insecure": is_insecure, "tls": {"certManager": {"enabled": True}}, "routes": routes}
    found = helm.release(values).rendered
    service = found.find("Service", "baton-gateway")["spec"]
    ports = {port["name"]: port["port"] for port in service["ports"]}
    for kind, port, hostname in (
        ("HTTPRoute", "http", "llm.example.com"),
        ("GRPCRoute", "grpc", "grpc.llm.example.com"),
    ):
        route = found.find(kind, "baton-gateway")
        validate(route)
        assert route["spec"]["hostnames"] == [hostname]
        assert route["spec"]["rules"][0]["backendRefs"] == [{"name": "baton-gateway", "port": ports[port]}]
    policies = found.of_kind("BackendTLSPolicy")
    assert len(policies) == (0 if is_insecure else 1)
    for policy in policies:
        validate(policy)
        assert policy["spec"]["targetRefs"] == [{"group": "", "kind": "Service", "name": "baton-gateway"}]
        certificate = found.find("Certificate", "baton-client")["spec"]
        assert policy["spec"]["validation"]["hostname"] in certificate["dnsNames"]


def test_the_dashboard_is_found_by_grafanas_sidecar(helm: Helm) -> None:
    found = helm.release(INSECURE, {"dashboard": {"enabled": True, "labels": {"team": "llm"}}}).rendered
    made = found.find("ConfigMap", "baton-dashboard")
    assert {"grafana_dashboard": "1", "team": "llm"}.items() <= made["metadata"]["labels"].items()
    (content,) = made["data"].values()
    assert json.loads(content) == json.loads(dashboard.dashboard())


def test_the_pod_of_helm_test_meets_the_strictest_profile_and_is_no_pod_of_baton(helm: Helm) -> None:
    release = helm.release({"images": {"registry": "registry.example.com", "pullSecrets": ["pull"]}})
    (pod,) = release.hooks.objects
    validate(pod)
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    own = release.rendered.deployment("gateway")["spec"]
    assert (
        pod["metadata"]["labels"]["app.kubernetes.io/name"] != own["selector"]["matchLabels"]["app.kubernetes.io/name"]
    )
    assert pod["spec"]["securityContext"] == own["template"]["spec"]["securityContext"]
    (container,) = pod["spec"]["containers"]
    assert container["image"] == release.rendered.container("gateway")["image"]
    assert container["securityContext"] == release.rendered.container("gateway")["securityContext"]
    assert "create secret generic baton-test-key" in release.notes
    assert not helm.release({"test": {"enabled": False}}).hooks.objects


def test_the_notes_of_a_cluster_without_tls_ask_for_no_key(helm: Helm) -> None:
    notes = helm.release(values_of("cpu-demo")).notes
    assert "helm test baton" in notes
    assert "KEY" not in notes
    assert "https" not in notes


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"extra": {"podSpec": {"nodeSelector": {"a": "b"}}}}, "use gateway.nodeSelector"),
        ({"decode": {"extra": {"podSpec": {"volumes": []}}}}, "use extra.volumes"),
        ({"extra": {"podSpec": {"dnsPolcy": "None"}}}, "dnsPolcy"),
        ({"extra": {"podSpec": {"topologySpreadConstraints": [{"topologyKey": "rack"}]}}}, "maxSkew"),
        ({"gateway": {"extra": {"podLabels": {"app.kubernetes.io/component": "mine"}}}}, "app.kubernetes.io/component"),
        ({"extra": {"volumes": [{"emptyDir": {}}]}}, "name"),
        ({"extra": {"volumeMounts": [{"name": "cache"}]}}, "mountPath"),
        ({"extra": {"envFrom": [{"secret": {"name": "a"}}]}}, "secret"),
        ({"gateway": {"service": {"type": "loadbalancer"}}}, "type"),
        ({"node": {"exclusiveTopology": "rack"}}, "node.exclusiveTopology needs node.kind LeaderWorkerSet"),
        ({"ingress": {"enabled": True}}, "ingress.enabled needs ingress.host"),
        ({"routes": {"enabled": True}}, "routes.enabled needs routes.parentRefs"),
        (
            {"insecure": False, "routes": {"enabled": True, "parentRefs": [{"name": "public"}]}},
            "routes.enabled needs routes.caConfigMap",
        ),
        (
            {
                "routes": {
                    "enabled": True,
                    "parentRefs": [{"name": "a"}],
                    "hostnames": ["a.b"],
                    "grpcHostnames": ["a.b"],
                }
            },
            "a.b is in routes.hostnames and in routes.grpcHostnames",
        ),
    ],
)
def test_wrong_values_are_refused_by_name(helm: Helm, values: Values, reason: str) -> None:
    with pytest.raises(Refused, match=re.escape(reason)):
        helm.release(INSECURE, values)


def test_the_file_of_values_has_every_value_of_the_schema() -> None:
    """So that a reader of values.yaml knows what there is."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values.keys() == schema["properties"].keys() - {"global"}
    assert values["extra"].keys() == schema["definitions"]["extra"]["properties"].keys()
    for section in ("ingress", "routes", "test", "dashboard", "rdma", "podMonitor"):
        assert values[section].keys() == schema["properties"][section]["properties"].keys()


def example(name: str, kind: str) -> Manifest:
    (found,) = [item for item in yaml.safe_load_all((EXAMPLES / name).read_text()) if item["kind"] == kind]
    spec: Manifest = found["spec"]
    return spec


def test_argo_cd_gives_values_that_the_chart_takes_and_leaves_counts_to_autoscalers(helm: Helm) -> None:
    spec = example("argo-cd.yaml", "Application")
    source = spec["source"]
    assert (ROOT / source["path"]).resolve() == CHART
    files = [yaml.safe_load((CHART / name).read_text()) for name in source["helm"]["valueFiles"]]
    values = merged([*files, source["helm"]["valuesObject"]])
    assert "RespectIgnoreDifferences=true" in spec["syncPolicy"]["syncOptions"]
    ignored = {(item["group"], item["kind"]) for item in spec["ignoreDifferences"]}
    for kind in ("Deployment", "LeaderWorkerSet"):
        for scaler in helm.release(values, {"node": {"kind": kind}}).rendered.of_kind("HorizontalPodAutoscaler"):
            target = scaler["spec"]["scaleTargetRef"]
            assert (target["apiVersion"].partition("/")[0], target["kind"]) in ignored


def test_flux_gives_values_that_the_chart_takes_and_leaves_counts_to_autoscalers(helm: Helm) -> None:
    spec = example("flux.yaml", "HelmRelease")
    chart = spec["chart"]["spec"]
    assert (ROOT / chart["chart"]).resolve() == CHART
    first, *_ = files = [ROOT / name for name in chart["valuesFiles"]]
    assert first == CHART / "values.yaml"
    found = helm.release(*(yaml.safe_load(file.read_text()) for file in files), spec["values"]).rendered
    ignored = {item["target"]["kind"] for item in spec["driftDetection"]["ignore"]}
    assert {item["spec"]["scaleTargetRef"]["kind"] for item in found.of_kind("HorizontalPodAutoscaler")} <= ignored


def test_a_post_renderer_changes_what_no_value_can(helm: Helm) -> None:
    release = helm.release(INSECURE)
    text = yaml.safe_dump_all([*release.rendered.objects, *release.hooks.objects])
    folder = EXAMPLES / "post-renderer"
    plugin = yaml.safe_load((folder / "plugin.yaml").read_text())
    (command,) = plugin["runtimeConfig"]["platformCommand"]
    program = Path(command["command"].replace("${HELM_PLUGIN_DIR}", str(folder)))
    environment = os.environ | {"PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])}
    done = subprocess.run(
        [program], input=text, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    found = Rendered(tuple(yaml.safe_load_all(done.stdout)))
    assert len(found.objects) == len(release.rendered.objects) + 1
    for role in ROLES:
        more = ["log-shipper"] if role == "gateway" else []
        assert [item["name"] for item in found.pod(role)["containers"]] == [role, *more]
        validate(found.deployment(role))


def test_the_prefill_node_of_a_pair_has_its_volumes_and_its_time(helm: Helm) -> None:
    scratch = {"volumes": [{"name": "s", "emptyDir": {}}], "volumeMounts": [{"name": "s", "mountPath": "/s"}]}
    prefill = {"extra": scratch, "settings": {"BATON_DRAIN_GRACE_S": 300}, "startupFailures": 720}
    found = helm.release(INSECURE, {"nvlinkPair": {"enabled": True}, "prefill": prefill}).rendered
    spec = found.deployment("decode")["spec"]
    assert {"name": "s", "emptyDir": {}} in spec["template"]["spec"]["volumes"]
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 315
    assert spec["progressDeadlineSeconds"] == 600 + 315 + 5 * 720
    # A volume of both node roles is there once.
    found = helm.release(INSECURE, {"nvlinkPair": {"enabled": True}, "node": {"extra": scratch}}).rendered
    assert [volume["name"] for volume in found.pod("decode")["volumes"]].count("s") == 1


def test_claims_of_ones_own_leave_those_that_containers_name(helm: Helm) -> None:
    mine = {"name": "mine", "resourceClaimName": "mine"}
    values: Values = {"node": {"extra": {"podSpec": {"resourceClaims": [mine]}}}}
    found = helm.release(
        INSECURE, {"nvlinkPair": {"enabled": True}, "computeDomain": {"enabled": True}}, values
    ).rendered
    assert [claim["name"] for claim in found.pod("decode")["resourceClaims"]] == ["imex-channel", "gpus", "mine"]


def test_the_longest_name_leaves_room_for_that_of_the_job(helm: Helm) -> None:
    model = {"directory": "m", "download": {"enabled": True, "repository": "a/m"}}
    for item in helm.release(INSECURE, {"model": model}, name="baton-" + "a" * 40).rendered.objects:
        assert len(item["metadata"]["name"]) <= 63


def test_the_pod_of_the_test_goes_to_hosts_of_its_images_architecture(helm: Helm) -> None:
    (pod,) = helm.release(INSECURE, {"images": {"architecture": "arm64"}}).hooks.objects
    assert pod["spec"]["nodeSelector"] == {"kubernetes.io/arch": "arm64"}


def test_the_notes_say_which_secrets_cert_manager_makes(helm: Helm) -> None:
    values: Values = {"tls": {"certManager": {"enabled": True}}}
    assert "makes all but the last one;" in helm.release(values).notes
    assert "makes all;" in helm.release(values, {"apiKeys": {"enabled": False}}).notes
