"""The part of a Kubernetes API server that discovery reads: list and watch of EndpointSlices, on a real HTTP server.

Objects and events have the published form of discovery.k8s.io/v1; the tests say what they hold.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.tcp_server import tcp_server

PATH = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"


def endpoint(host: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [host], "conditions": conditions or {"ready": True, "serving": True, "terminating": False}}


def endpoint_slice(name: str, *endpoints: dict[str, Any], family: str = "IPv4", port: int = 7002) -> dict[str, Any]:
    return {
        "addressType": family,
        "apiVersion": "discovery.k8s.io/v1",
        "endpoints": list(endpoints),
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": "baton", "labels": {"kubernetes.io/service-name": "baton-decode"}},
        "ports": [{"name": "grpc", "port": port, "protocol": "TCP"}],
    }


@dataclass
class ApiServer:
    """Answers one list after the other, and streams events to watches.

    Attributes:
        asked: paths with queries, in order.
        slices: what a list has.
        refusals: codes of HTTP for the next requests, in place of answers.
    """

    port: int = 0
    asked: list[str] = field(default_factory=list)
    slices: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[int] = field(default_factory=list)
    version: int = 100
    watchers: list[asyncio.StreamWriter] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, kind: str, what: dict[str, Any]) -> None:
        """An event to every watch."""
        if kind != "ERROR":
            self.version += 1
            what.setdefault("metadata", {})["resourceVersion"] = str(self.version)
        line = json.dumps({"type": kind, "object": what}).encode() + b"\n"
        for writer in self.watchers:
            writer.write(b"%x\r\n%b\r\n" % (len(line), line))

    def end_watches(self) -> None:
        """Ends them as a server does after `timeoutSeconds`."""
        for writer in self.watchers:
            writer.write(b"0\r\n\r\n")
        self.watchers.clear()

    def cut_watches(self) -> None:
        for writer in self.watchers:
            writer.transport.abort()
        self.watchers.clear()

    async def until_watched(self) -> None:
        while not self.watchers:
            self.changed.clear()
            await self.changed.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            self._answer(head.split()[1].decode(), writer)
            self.changed.set()

    def _answer(self, asked: str, writer: asyncio.StreamWriter) -> None:
        self.asked.append(asked)
        kind = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\n"
        if self.refusals:
            writer.write(kind % (b"%d Refused" % self.refusals.pop(0)) + b"Content-Length: 2\r\n\r\n{}")
        elif "watch=True" in asked or "watch=true" in asked:
            writer.write(kind % b"200 OK" + b"Transfer-Encoding: chunked\r\n\r\n")
            self.watchers.append(writer)
        else:
            listed = {"kind": "EndpointSliceList", "metadata": {"resourceVersion": str(self.version)}}
            body = json.dumps({**listed, "items": self.slices}).encode()
            writer.write(kind % b"200 OK" + b"Content-Length: %d\r\n\r\n" % len(body) + body)


@asynccontextmanager
async def api_server(folder: Path) -> AsyncIterator[ApiServer]:
    """A server, and the file `folder/config` for KUBECONFIG."""
    served = ApiServer()
    async with tcp_server(served.serve) as served.port:
        _write_config(folder / "config", served.port)
        yield served


def _write_config(file: Path, port: int) -> None:
    kube_config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "us", "user": {"token": "secret"}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "us", "namespace": "of-context"}}],
        "current-context": "here",
    }
    file.write_text(json.dumps(kube_config))
