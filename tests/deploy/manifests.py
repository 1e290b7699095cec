"""Renders a kustomization with kubectl, finds objects in the result, and checks them against their schemas."""

import json
import os
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from baton.settings.config import CommonSettings
from baton.settings.gateway_config import GatewaySettings
from baton.settings.node_config import DecodeSettings, PrefillSettings

ROOT = Path(__file__).resolve().parents[2]
KUSTOMIZE = ROOT / "deploy" / "kustomize"
BASE = KUSTOMIZE / "base"
OVERLAYS = KUSTOMIZE / "overlays"
CPU_DEMO = OVERLAYS / "cpu-demo"
NVIDIA = OVERLAYS / "nvidia"

ROLE_LABEL = "app.kubernetes.io/component"
SETTINGS: Mapping[str, type[CommonSettings]] = {
    "gateway": GatewaySettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
}
ROLES = tuple(SETTINGS)
NODE_ROLES = ("prefill", "decode")

# Custom resources whose schemas are at hand, and those whose are not.
SCHEMAS = Path(__file__).parent / "schemas"
WITHOUT_SCHEMA = frozenset({"Certificate", "Issuer", "PrometheusRule"})
KUBERNETES = "1.37"

# Values that the kubelet fills in, which only a cluster knows.
FIELDS = {
    "status.podIP": "10.0.0.7",
    "metadata.name": "the-pod",
    "spec.nodeName": "the-host",
    "metadata.labels['topology.kubernetes.io/zone']": "",
}

# Manifests are plain data of any shape.
Manifest = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """All objects of one kustomization."""

    objects: tuple[Manifest, ...]

    def of_kind(self, kind: str) -> list[Manifest]:
        return [item for item in self.objects if item["kind"] == kind]

    def find(self, kind: str, name: str) -> Manifest:
        (found,) = [item for item in self.of_kind(kind) if item["metadata"]["name"] == name]
        return found

    def deployment(self, role: str) -> Manifest:
        return self.find("Deployment", f"baton-{role}")

    def job(self) -> Manifest:
        """The download's, whose name ends in a hash."""
        (found,) = self.of_kind("Job")
        return found

    def pod(self, role: str) -> Manifest:
        pod: Manifest = self.deployment(role)["spec"]["template"]["spec"]
        return pod

    def container(self, role: str) -> Manifest:
        (container,) = self.pod(role)["containers"]
        found: Manifest = container
        return found

    def ports(self, role: str) -> dict[str, int]:
        """The container's open ports by name."""
        return {port["name"]: port["containerPort"] for port in self.container(role)["ports"]}

    def environment(self, role: str) -> dict[str, str]:
        """The environment of the role's process."""
        return self.environment_of(self.container(role), FIELDS)

    def environment_of(self, container: Manifest, fields: Mapping[str, str]) -> dict[str, str]:
        """The variables that a container's manifest gives it, with these values of the pod's fields, and those of
        `FIELDS` for the others."""
        fields = {**FIELDS, **fields}
        values: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            values.update(self.find("ConfigMap", source["configMapRef"]["name"])["data"])
        for item in container.get("env", ()):
            text = item["value"] if "value" in item else fields[item["valueFrom"]["fieldRef"]["fieldPath"]]
            for name, value in values.items():
                text = text.replace(f"$({name})", value)
            values[item["name"]] = text
        return values

    def settings(self, role: str) -> dict[str, str]:
        """The BATON_ part of the environment, by the setting's name."""
        environment = self.environment(role)
        return {name[6:].lower(): value for name, value in environment.items() if name.startswith("BATON_")}

    def pods(self) -> Iterator[tuple[str, Manifest]]:
        for role in ROLES:
            yield role, self.pod(role)


class RenderingFailed(Exception):
    """Kustomize stops or warns; the message is its own."""


def render(directory: Path) -> Rendered:
    """What `kubectl apply --kustomize` sends.

    Raises:
        RenderingFailed: also on a warning.
    """
    kubectl = Path(sysconfig.get_path("scripts")) / "kubectl"
    done = subprocess.run([kubectl, "kustomize", directory], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode or done.stderr:
        raise RenderingFailed(done.stderr)
    return Rendered(tuple(yaml.load_all(done.stdout, Loader=yaml.CSafeLoader)))


def render_with(here: Path, base: Path, *components: Path) -> Rendered:
    """The base with components added, through an overlay that is written into the empty directory `here`."""
    # Kustomize accepts only relative paths, and resolves symbolic links first.
    here = here.resolve()
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "baton",
        "resources": [os.path.relpath(base, here)],
        "components": [os.path.relpath(component, here) for component in components],
    }
    (here / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    return render(here)


def validate(item: Manifest) -> None:
    """Raises where the object does not fit the schema of its kind."""
    schema = SCHEMAS / f"{item['kind']}.json"
    if schema.is_file():
        jsonschema.validate(item, json.loads(schema.read_text()))
    elif item["kind"] not in WITHOUT_SCHEMA:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)
