"""Runs the containers of rendered pods as processes of this machine, with what the kubelet would give and do.

A pod has no network of its own here, but an address of its own on the loopback device: so it has the ports of its
manifest, and [::] becomes that address. Names of services become addresses, mounts become directories. A container's
limits are not enforced: `peak_bytes` measures the memory that it used.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.images import Stage, entrypoint_of, environment_of
from tests.deploy.manifests import ROOT, Manifest, Rendered

# Between two looks at a state; a kubelet waits seconds.
_POLL_S = 0.05
# Only what hangs takes so long, on any machine.
_DEADLINE_S = 300.0

# A volume's directory, from the volume as the manifest has it.
Volume = Callable[[Manifest], Path]


def addresses() -> Callable[[], str]:
    """Addresses of the loopback device, of a network that no other test has."""
    network = f"127.{20 + secrets.randbelow(200)}.{secrets.randbelow(256)}"
    numbers = iter(range(1, 255))
    return lambda: f"{network}.{next(numbers)}"


@dataclass
class Pod:
    """One pod of a role: its init containers run to their end, then its container until it is stopped."""

    rendered: Rendered
    role: str
    stages: dict[str, Stage]
    address: str
    services: Mapping[str, str]  # address of the pod by name of its service
    volume: Volume
    logs: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def container(self) -> Manifest:
        return self.rendered.container(self.role)

    def start(self) -> None:
        spec = self.rendered.pod(self.role)
        for container in spec.get("initContainers", ()):
            started = self._run(container, container["command"])
            assert started.wait(_DEADLINE_S) == 0, self.log()
        command = self.container.get("command") or entrypoint_of(self.stages, self._target(self.container))
        self._process = self._run(self.container, [*command, *self.container.get("args", ())])

    def passes(self, probe: Manifest) -> bool:
        """Whether the probe succeeds now."""
        with grpc.insecure_channel(f"{self.address}:{probe['grpc']['port']}") as channel:
            request = health_pb2.HealthCheckRequest(service=probe["grpc"].get("service", ""))
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = stub.Check(request, timeout=_DEADLINE_S)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def wait_until_it_passes(self, name: str) -> None:
        """Returns once a probe passes."""
        probe = self.container[name]
        deadline = time.monotonic() + _DEADLINE_S
        while not self.passes(probe):
            assert self.process.poll() is None, f"{self.role} ended: {self.log()}"
            assert time.monotonic() < deadline, f"{name} of {self.role} never passed: {self.log()}"
            time.sleep(_POLL_S)

    def peak_bytes(self) -> int:
        """The most memory that its processes had, each at its own peak."""
        root = psutil.Process(self.process.pid)
        total = 0
        for process in (root, *root.children(recursive=True)):
            with suppress(FileNotFoundError):  # ended meanwhile
                status = Path(f"/proc/{process.pid}/status").read_text()
                (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
                total += int(peak) * 1024
        return total

    def terminate(self) -> None:
        """SIGTERM, which the kubelet sends after preStop."""
        self.process.send_signal(signal.SIGTERM)

    def wait_for_its_end(self) -> int:
        """The exit code. The kubelet kills a container when its grace period, which includes preStop, is over."""
        before_s = self.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        return self.process.wait(self.rendered.pod(self.role)["terminationGracePeriodSeconds"] - before_s)

    def kill(self) -> None:
        """Ends all its processes, if they still run."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            self._process.wait(_DEADLINE_S)

    def log(self) -> str:
        return (self.logs / f"{self.role}.log").read_text()[-4000:]

    @property
    def process(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None
        return self._process

    def _run(self, container: Manifest, command: list[str]) -> "subprocess.Popen[bytes]":
        folders = self._folders(container)
        environment = self._environment(container, folders)
        with (self.logs / f"{self.role}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable if word == "python" else word for word in command],
                env=environment,
                cwd=folders.get("/tmp", self.logs),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _target(self, container: Manifest) -> str:
        return str(container["image"].partition(":")[0].removeprefix("baton-"))

    def _folders(self, container: Manifest) -> dict[str, Path]:
        """The directory of each mount by its path in the container."""
        volumes: dict[str, Any] = {item["name"]: item for item in self.rendered.pod(self.role)["volumes"]}
        return {mount["mountPath"]: self.volume(volumes[mount["name"]]) for mount in container["volumeMounts"]}

    def _environment(self, container: Manifest, folders: Mapping[str, Path]) -> dict[str, str]:
        """Nothing of this process's own environment but where programs are."""
        image = environment_of(self.stages, self._target(container)) | {"PATH": os.defpath}
        given = self.rendered.environment_of(container, {"status.podIP": self.address, "metadata.name": self.role})
        values = {name: self._here(value, folders) for name, value in (image | given).items()}
        # A container sees the GPUs that its manifest asks for: here none.
        # An image has Baton installed; here it is this checkout, whichever the interpreter has.
        return values | {"TMPDIR": values["HOME"], "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}

    def _here(self, value: str, folders: Mapping[str, Path]) -> str:
        for path, folder in folders.items():
            if value == path or value.startswith(f"{path}/"):
                return f"{folder}{value.removeprefix(path)}"
        for service, address in self.services.items():
            value = re.sub(rf"^{service}:", f"{address}:", value)
        return value.replace("[::]", self.address)
