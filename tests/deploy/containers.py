"""Runs built images as containers, as a kubelet would: with user, read-only root, limits and probes of the manifests.

    python -m tests.deploy.containers --image gateway=NAME --image prefill=NAME --image decode=NAME

It takes the overlay cpu-demo, on a network of its own that has IPv6 alone. It needs root, Linux, buildah and runc, so
no test starts it. It prints what each container may do, and the answer to a request through all three.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.manifests import CPU_DEMO, ROLES, Manifest, Rendered, render
from tests.deploy.test_manifests import mebibytes

_POLL_S = 0.2
_DEADLINE_S = 120.0
_NAMESPACE = ["pid", "ipc", "uts", "mount"]
_HOST = "fd00:ba70::1"  # of this process, on the bridge
_ADDRESSES = {role: f"fd00:ba70::{number}" for number, role in enumerate(ROLES, 7)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", action="append", default=[], metavar="ROLE=NAME", required=True)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.inside:
        # A network and mounts that end with this process.
        command = ["unshare", "--net", "--mount", sys.executable, "-m", "tests.deploy.containers", "--inside"]
        sys.exit(subprocess.run([*command, *sys.argv[1:]], check=False).returncode)
    images = dict(text.split("=", 1) for text in given.image)
    rendered = render(CPU_DEMO)
    with ExitStack() as stack:
        here = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(_bridge())
        containers = {role: _container(rendered, role, images[role], here / role) for role in ROLES}
        running = {role: stack.enter_context(container) for role, container in containers.items()}
        for role, process in running.items():
            _wait_until_it_passes(rendered.container(role)["readinessProbe"], _ADDRESSES[role], process)
            _report(role)
        print(_completion(rendered))


@contextmanager
def _bridge() -> Iterator[None]:
    """A bridge between the pods, with an address for this process. The kernel removes it with the namespace."""
    _ip("link add dev pods type bridge")
    # No address is tentative, so processes can bind at once.
    Path("/proc/sys/net/ipv6/conf/pods/accept_dad").write_text("0")
    _ip("link set dev pods up", "link set dev lo up", f"-6 address add {_HOST}/64 dev pods nodad")
    yield


@contextmanager
def _container(rendered: Rendered, role: str, image: str, bundle: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A running container of the role's pod, in a network namespace of its own; deleted at the end."""
    name = f"baton-{role}"
    with ExitStack() as stack:
        _run("ip", "netns", "add", name)
        stack.callback(_run, "ip", "netns", "delete", name)
        _ip(f"link add dev {role} type veth peer name eth0 netns {name}", f"link set dev {role} master pods up")
        for command in (
            "link set dev lo up",
            "link set dev eth0 up",
            f"-6 address add {_ADDRESSES[role]}/64 dev eth0 nodad",
        ):
            _run("ip", "-netns", name, *command.split())
        made = _run("buildah", "from", image)
        stack.callback(_run, "buildah", "rm", made)
        root = _run("buildah", "mount", made)
        bundle.mkdir()
        # Cluster DNS, which finds services.
        (bundle / "hosts").write_text("".join(f"{address} baton-{other}\n" for other, address in _ADDRESSES.items()))
        config = json.loads(_run("buildah", "inspect", "--type", "image", image))["OCIv1"]["config"]
        spec = _specification(rendered, role, config, root, bundle)
        (bundle / "config.json").write_text(json.dumps(spec))
        log = stack.enter_context((bundle / "log").open("w"))
        process = subprocess.Popen(["runc", "run", "--bundle", bundle, name], stdout=log, stderr=log)
        try:
            yield process
        finally:
            if process.poll() is None:
                _run("runc", "kill", name, "TERM")
            code = process.wait(rendered.pod(role)["terminationGracePeriodSeconds"])
            print(f"{role}: ended with {code} after SIGTERM; its last lines:")
            print((bundle / "log").read_text()[-600:])


def _specification(rendered: Rendered, role: str, config: Manifest, root: str, bundle: Path) -> Manifest:
    """The OCI runtime's specification of a container, from manifest and image."""
    container, pod = rendered.container(role), rendered.pod(role)
    image = dict(text.split("=", 1) for text in config["Env"])
    fields = {"status.podIP": _ADDRESSES[role], "metadata.name": role}
    environment = image | rendered.environment_of(container, fields)
    security = container["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": pod["securityContext"]["runAsUser"], "gid": pod["securityContext"]["runAsGroup"]},
            "args": [*config["Entrypoint"], *container.get("args", ())],
            "env": [f"{name}={value}" for name, value in environment.items()],
            "cwd": config.get("WorkingDir") or "/",
            "noNewPrivileges": not security["allowPrivilegeEscalation"],
            "capabilities": {},
        },
        "root": {"path": root, "readonly": security["readOnlyRootFilesystem"]},
        "hostname": role,
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/sys", "type": "none", "source": "/sys", "options": ["rbind", "ro"]},
            {"destination": "/etc/hosts", "type": "none", "source": str(bundle / "hosts"), "options": ["bind", "ro"]},
            *_volumes(pod, container),
        ],
        "linux": {
            "namespaces": [
                *({"type": kind} for kind in _NAMESPACE),
                {"type": "network", "path": f"/run/netns/baton-{role}"},
            ],
            "resources": {
                "memory": {"limit": int(mebibytes(container["resources"]["limits"]["memory"])) << 20},
            },
        },
    }


def _volumes(pod: Manifest, container: Manifest) -> Iterator[Manifest]:
    """The mounts of a pod's emptyDirs, in memory, with their limits."""
    volumes: Mapping[str, Any] = {item["name"]: item for item in pod["volumes"]}
    for mount in container["volumeMounts"]:
        size = volumes[mount["name"]]["emptyDir"]["sizeLimit"]
        options = ["nosuid", "nodev", "mode=1777", f"size={size.removesuffix('i')}"]
        yield {"destination": mount["mountPath"], "type": "tmpfs", "source": "tmpfs", "options": options}


def _wait_until_it_passes(probe: Manifest, address: str, process: subprocess.Popen[bytes]) -> None:
    """Asks as the kubelet does, without a certificate and from outside the pod."""
    deadline = time.monotonic() + _DEADLINE_S
    with grpc.insecure_channel(f"[{address}]:{probe['grpc']['port']}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=probe["grpc"]["service"])
        while True:
            try:
                if stub.Check(request, timeout=5).status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError as error:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise SystemExit(f"{address} never passed its readiness probe: {error}") from None
            time.sleep(_POLL_S)


def _report(role: str) -> None:
    """Prints what the kernel lets the container's process do."""
    state = json.loads(_run("runc", "state", f"baton-{role}"))
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{state['pid']}/status").read_text().splitlines() if ":" in line
    )
    seen = {name: status[name].split()[0] for name in ("Uid", "NoNewPrivs", "CapEff", "VmHWM")}
    root = next(
        line.split()[3]
        for line in Path(f"/proc/{state['pid']}/mounts").read_text().splitlines()
        if line.split()[1] == "/"
    )
    print(f"{role}: ready; {seen}; root mounted {root.split(',')[0]}")


def _completion(rendered: Rendered) -> str:
    port = rendered.ports("gateway")["http"]
    # A prompt that is long enough for a prefill node.
    body = {"model": "llama", "prompt": "The conductor of the orchestra " * 24, "max_tokens": 8, "ignore_eos": True}
    base = f"http://[{_ADDRESSES['gateway']}]:{port}"
    with urllib.request.urlopen(f"{base}/v1/models", timeout=_DEADLINE_S) as models:
        body["model"] = json.load(models)["data"][0]["id"]
    headers = {"content-type": "application/json", "x-baton-receipt": "1"}
    request = urllib.request.Request(f"{base}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=_DEADLINE_S) as answer:
            return f"{answer.status} {answer.read().decode()}"
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"


def _ip(*commands: str) -> None:
    for command in commands:
        _run("ip", *command.split())


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_DEADLINE_S)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
