"""Callers without a key that send large bodies to a gateway, all at once, over every door and in every form."""

import http.client
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

MIB = 1 << 20
# What a gateway takes from a client, and the most that gRPC accepts so that the gateway can say what is wrong.
LARGE_BYTES, LARGEST_BYTES = 31 * MIB, 40 * MIB
_PIECE = bytes(MIB)
_DEADLINE_S = 300.0

METHODS = (
    "/baton.v1.Generation/Generate",
    "/grpc.health.v1.Health/Check",
    "/inference.GRPCInferenceService/ModelReady",
)
PATHS = ("/v1/completions", "/nothing")


@dataclass(frozen=True)
class Door:
    """A gateway's address with the ports and the name of its certificate; without a CA it has no TLS."""

    host: str
    grpc_port: int
    http_port: int
    ca: Path | None = None
    server_name: str = ""

    def channel(self) -> grpc.Channel:
        options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.ssl_target_name_override", self.server_name or self.host),
        ]
        target = f"{self.host}:{self.grpc_port}"
        if self.ca is None:
            return grpc.insecure_channel(target, options)
        return grpc.secure_channel(target, grpc.ssl_channel_credentials(self.ca.read_bytes()), options)

    def connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.host, self.http_port, timeout=_DEADLINE_S)
        plain = socket.create_connection((self.host, self.http_port), _DEADLINE_S)
        if self.ca is not None:
            plain = ssl.create_default_context(cafile=self.ca).wrap_socket(plain, server_hostname=self.server_name)
        connection.sock = plain
        return connection


def send_large(door: Door, count: int) -> set[str]:
    """Sends `count` large bodies to each method and path, all at the same time. Returns the outcomes that calls had."""
    with ThreadPoolExecutor(count * (len(METHODS) + len(PATHS))) as threads:
        calls = [threads.submit(_call, door, method) for method in METHODS for _ in range(count)]
        posts = [threads.submit(_post, door, path) for path in PATHS for _ in range(count)]
        return {each.result() for each in (*calls, *posts)}


def _call(door: Door, method: str) -> str:
    body = bytes(LARGEST_BYTES if "Health" in method else LARGE_BYTES)
    with door.channel() as channel:
        try:
            call: Any = channel.unary_stream(method)
            for _ in call(body, timeout=_DEADLINE_S, wait_for_ready=True):
                return "served"
        except grpc.RpcError as error:
            return str(error.code().name)
    return "served"


def _post(door: Door, path: str) -> str:
    with closing(door.connect()) as connection:
        connection.putrequest("POST", path)
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", str(LARGE_BYTES))
        connection.endheaders()
        with suppress(ConnectionError, ssl.SSLError):  # a server may stop reading once it has answered
            for _ in range(LARGE_BYTES // MIB):
                connection.send(_PIECE)
        try:
            return str(connection.getresponse().status)
        except (ConnectionError, http.client.HTTPException, ssl.SSLError):
            return "closed"
