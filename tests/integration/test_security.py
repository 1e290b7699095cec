"""A cluster under mutual TLS whose gateway wants keys: it serves as any other, and refuses everybody else with a typed
error."""

import asyncio
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.cli.processes import Process
from baton.client.operators import OperatorClient
from baton.core.errors import BatonError, InvalidRequest, NoNode, Overloaded, PermissionDenied, Unauthenticated
from baton.core.types import Grammar, GrammarKind
from baton.protos.internal.v1 import decode_pb2_grpc, node_pb2, node_pb2_grpc, prefill_pb2_grpc
from baton.protos.internal.v1 import prefill_pb2 as prefill_messages
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import connect
from baton.rpc.status import from_rpc_error
from baton.security.certificates import CLIENTS, Authority, write_set
from baton.security.keys import entry, new_key
from baton.security.pem import Files, Pems, read_pems
from baton.security.roles import NODE, Role, name_of
from baton.security.tls import Dial
from baton.security.watched import Watched
from tests.integration.cluster import DEADLINE_S, Machines, machines
from tests.integration.reference import Reference

PROMPT = list(range(5, 69))
LIMITS = {"carol": "requests_per_minute = 1\n"}
DAY = timedelta(days=1)


@dataclass(frozen=True)
class Secured:
    """A running cluster, its certificates, and the keys of two clients and an operator."""

    folder: Path
    started: Machines
    prefill: Process
    decode: Process
    gateway: Process
    keys: dict[str, str]
    logs: Path

    def client(self, name: str | None) -> OperatorClient:
        key = self.keys[name] if name else None
        return OperatorClient(self.gateway.address, api_key=key, tls_ca=self.folder / "ca.crt", retry_s=0.0)

    def dial(self, role: Role, *, to: str = NODE) -> Dial:
        return dial_with(self.folder, role, to=to)

    @property
    def http(self) -> str:
        assert self.gateway.http is not None
        return self.gateway.http

    def post(self, path: str, body: object, headers: dict[str, str]) -> tuple[int, Any]:
        """A GET if there is no body."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.http + path, data, {"content-type": "application/json", **headers})
        try:
            with urllib.request.urlopen(
                request, context=ssl.create_default_context(cafile=self.folder / "ca.crt")
            ) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def write_keys(self, *names: str) -> None:
        write_keys(self.folder, self.keys, *names)


def dial_with(folder: Path, name: str, *, to: str = NODE) -> Dial:
    files = Files(folder / f"{name}.crt", folder / f"{name}.key", folder / "ca.crt")
    return Dial(Watched(files.paths, lambda: read_pems(files)), server_name=to)


def write_keys(folder: Path, keys: dict[str, str], *names: str) -> None:
    lines = [entry(name, keys[name], operator=name == "operator") + LIMITS.get(name, "") for name in names]
    temporary = folder / "keys.part"
    temporary.write_text("\n".join(lines))
    temporary.replace(folder / "keys.toml")


def own(folder: Path, role: str) -> dict[str, Any]:
    return {"tls_cert": folder / f"{role}.crt", "tls_key": folder / f"{role}.key", "tls_ca": folder / "ca.crt"}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder, logs = tmp_path_factory.mktemp("certs"), tmp_path_factory.mktemp("logs")
    write_set(folder, hosts=["127.0.0.1"], days=1)
    keys = {name: new_key() for name in ("alice", "bob", "carol", "operator")}
    write_keys(folder, keys, *keys)
    with machines() as started:
        prefill, decode = started.nodes(
            ("prefill", own(folder, "prefill")), ("decode", own(folder, "decode")), outputs=logs
        )
        doors: dict[str, Any] = {
            "client_tls_cert": folder / f"{CLIENTS}.crt",
            "client_tls_key": folder / f"{CLIENTS}.key",
            "api_keys": folder / "keys.toml",
            "http_listen": "127.0.0.1:0",
            "log_level": "debug",
        }
        (logs / "gateway").mkdir()
        gateway = started.gateway([prefill], [decode], outputs=logs / "gateway", **own(folder, "gateway"), **doors)
        yield Secured(folder, started, prefill, decode, gateway, keys, logs)


async def test_a_client_with_a_key_gets_the_tokens_of_the_reference(secured: Secured, reference: Reference) -> None:
    async with secured.client("alice") as client:
        whole = await client.complete(PROMPT, {"max_tokens": 12, "temperature": 0, "ignore_eos": True})
    assert [token.token_id for token in whole.tokens] == reference.greedy(PROMPT, 12).token_ids
    assert whole.receipt.path.value == "remote"


async def test_a_key_opens_http_too(secured: Secured, reference: Reference) -> None:
    expected = reference.tokenizer.decode(reference.greedy(PROMPT, 12).token_ids)
    body = {"model": "llama", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    for header in ("authorization", "x-api-key"):
        key = secured.keys["alice"]
        given = {header: f"Bearer {key}" if header == "authorization" else key}
        status, answer = await asyncio.to_thread(secured.post, "/v1/completions", body, given)
        assert (status, answer["choices"][0]["text"]) == (200, expected)


async def test_a_caller_without_a_valid_key_is_unauthenticated_on_both_ports(secured: Secured) -> None:
    target, ca = secured.gateway.address, secured.folder / "ca.crt"
    for key in (None, "baton-guessed", "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhIn0."):
        async with OperatorClient(target, api_key=key, tls_ca=ca) as client:
            with pytest.raises(Unauthenticated):
                await client.complete(PROMPT)
            with pytest.raises(Unauthenticated):
                await client.cluster_status()
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        status, answer = await asyncio.to_thread(secured.post, "/v1/completions", {"prompt": "x"}, headers)
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        assert key is None or key not in json.dumps(answer)
    status, answer = await asyncio.to_thread(secured.post, "/v1/messages", {}, {"x-api-key": "guessed"})
    assert (status, answer["error"]["type"]) == (401, "authentication_error")


async def test_only_an_operator_sees_the_cluster(secured: Secured) -> None:
    async with secured.client("alice") as client:
        with pytest.raises(PermissionDenied):
            await client.cluster_status()
    async with secured.client("operator") as client:
        assert len((await client.cluster_status()).nodes) == 2
    alice = {"authorization": f"Bearer {secured.keys['alice']}"}
    assert (await asyncio.to_thread(secured.post, "/metrics", None, alice))[0] == 403


async def test_a_client_over_its_limit_is_told_when_to_come_back_and_disturbs_nobody(secured: Secured) -> None:
    given = {"authorization": f"Bearer {secured.keys['carol']}"}
    began_s = time.monotonic()
    async with secured.client("carol") as carol, secured.client("alice") as alice:
        refusals: list[Overloaded] = []

        async def by_grpc() -> bool:
            """Whether a request is served."""
            try:
                await carol.complete(PROMPT, {"max_tokens": 1})
            except Overloaded as error:
                refusals.append(error)
                return False
            return True

        async def by_http() -> bool:
            body = {"prompt": "x", "max_tokens": 1}
            status, _ = await asyncio.to_thread(secured.post, "/v1/completions", body, given)
            assert status in (200, 429)
            return status == 200

        served = [await by_grpc()]
        while any(served[-2:]):
            served += [await by_grpc(), await by_http()]
        await alice.complete(PROMPT, {"max_tokens": 1})
    for each in refusals:
        assert "carol is at its limit of 1 requests per minute" in str(each)
        assert each.retry_after_s is not None
    # One limit for both ports: on a machine so slow that a minute passes, the next request is served.
    assert 1 <= sum(served) <= 1 + (time.monotonic() - began_s) / 60


async def test_a_client_without_tls_or_with_another_ca_is_refused_with_the_reason(
    secured: Secured, tmp_path: Path
) -> None:
    async with OperatorClient(secured.gateway.address, api_key=secured.keys["alice"]) as client:
        with pytest.raises(NoNode, match="cannot reach"):
            await client.complete(PROMPT)
    Authority.new(days=1).pair.write(tmp_path, "ca")
    async with OperatorClient(secured.gateway.address, tls_ca=tmp_path / "ca.crt") as client:
        with pytest.raises(NoNode, match="not from the CA that is trusted here"):
            await client.complete(PROMPT)


async def refusal(address: str, dial: Dial | None, method: str, *, wait: bool = True) -> type[BatonError]:
    """The error of one call, made with these credentials.

    Args:
        wait: until the server is connected, which a busy machine needs.
    """
    async with connect(address, dial=dial) as channel:
        node, prefill = node_pb2_grpc.NodeStub(channel), prefill_pb2_grpc.PrefillStub(channel)
        decode = decode_pb2_grpc.DecodeStub(channel)
        # NOTE: writes nothing, since a client that writes to a call that has ended may see INTERNAL instead.
        made: dict[str, Any] = {
            "describe": lambda: node.Describe(node_pb2.DescribeRequest(), wait_for_ready=wait),
            "drain": lambda: node.Drain(node_pb2.DrainRequest(grace_s=0.0), wait_for_ready=wait),
            "prefill": lambda: prefill.Prefill(prefill_messages.PrefillRequest(), wait_for_ready=wait).read(),
            "connect": lambda: prefill.Connect(
                prefill_messages.ConnectRequest(decode_address="127.0.0.1:1"), wait_for_ready=wait
            ),
            "session": lambda: decode.Session(wait_for_ready=wait).read(),
            "pair": lambda: decode.Pair(wait_for_ready=wait).read(),
        }
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await made[method]()
    return type(from_rpc_error(caught.value))


async def test_unauthenticated_peers_reach_no_node(secured: Secured, tmp_path: Path) -> None:
    """Without a certificate, with one of another CA, and with one that has expired."""
    write_set(tmp_path, hosts=["127.0.0.1"], days=1)
    (tmp_path / "theirs").mkdir()
    for name in ("operator", "gateway"):
        for suffix in (".crt", ".key"):
            (tmp_path / "theirs" / f"{name}{suffix}").write_bytes((tmp_path / f"{name}{suffix}").read_bytes())
    (tmp_path / "theirs" / "ca.crt").write_bytes((secured.folder / "ca.crt").read_bytes())
    expired = tmp_path / "expired"
    expired.mkdir()
    Authority.read(secured.folder).for_role(Role.OPERATOR, lifetime=-DAY).write(expired, "operator")
    (expired / "ca.crt").write_bytes((secured.folder / "ca.crt").read_bytes())
    anonymous = Files(None, None, secured.folder / "ca.crt")
    peers = {
        "without TLS": None,
        "without a certificate": Dial(Watched(anonymous.paths, lambda: read_pems(anonymous)), server_name=NODE),
        "of another CA": dial_with(tmp_path / "theirs", "operator"),
        "expired": Dial(Watched([], lambda: unchecked(expired, "operator")), server_name=NODE),
    }
    for node in (secured.prefill, secured.decode):
        for name, dial in peers.items():
            for method in ("describe", "drain"):
                assert await refusal(node.address, dial, method, wait=False) is NoNode, name
    assert secured.decode.popen.poll() is None


def unchecked(folder: Path, name: str) -> Pems:
    """The files as they are: a node would not start with an expired certificate, an attacker would."""
    return Pems(*((folder / file).read_bytes() for file in (f"{name}.crt", f"{name}.key", "ca.crt")))


async def test_a_certificate_of_another_role_is_refused(secured: Secured) -> None:
    wrong = [
        (secured.decode, Role.PREFILL, "session"),
        (secured.prefill, Role.PREFILL, "prefill"),
        (secured.prefill, Role.DECODE, "connect"),
        (secured.decode, Role.GATEWAY, "pair"),
        (secured.decode, Role.OPERATOR, "pair"),
        (secured.decode, Role.GATEWAY, "drain"),
        (secured.prefill, Role.GATEWAY, "drain"),
        (secured.decode, Role.PREFILL, "describe"),
    ]
    for node, role, method in wrong:
        assert await refusal(node.address, secured.dial(role), method) is PermissionDenied, (role, method)
    async with connect(secured.decode.address, dial=secured.dial(Role.OPERATOR)) as channel:
        status = await node_pb2_grpc.NodeStub(channel).Describe(node_pb2.DescribeRequest())
        assert status.info.role == node_status_pb2.ROLE_DECODE


async def test_a_node_of_another_role_is_not_talked_to(secured: Secured) -> None:
    dial = secured.dial(Role.GATEWAY, to=name_of(Role.PREFILL))
    assert await refusal(secured.decode.address, dial, "prefill", wait=False) is NoNode


async def test_a_prefill_node_says_nothing_of_what_is_no_decode_node(secured: Secured) -> None:
    """It connects only to servers whose certificate is that of a decode node, never to anything else."""
    async with connect(secured.prefill.address, dial=secured.dial(Role.GATEWAY)) as channel:
        stub = prefill_pb2_grpc.PrefillStub(channel)
        for address in (secured.prefill.address, secured.gateway.address):
            state = await stub.Connect(prefill_messages.ConnectRequest(decode_address=address))
            assert state.phase == node_status_pb2.PEER_PHASE_LOST
            assert state.name == address
        for address in ("unix:/run/secret.sock", "dns:///example.com", "nowhere"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Connect(prefill_messages.ConnectRequest(decode_address=address))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_cache_tells_a_client_nothing_about_others(secured: Secured) -> None:
    prompt = [token + 100 for token in PROMPT]
    found = []
    for name in ("alice", "alice", "bob"):
        async with secured.client(name) as client:
            whole = await client.complete(prompt, {"max_tokens": 4, "ignore_eos": True})
            found.append(whole.usage.cached_tokens + whole.receipt.prefill_cached_tokens)
    first, again, of_another = found
    assert (first, of_another) == (0, 0)
    assert again > 0


async def test_a_client_ends_only_its_own_requests(secured: Secured) -> None:
    async with secured.client("alice") as alice, secured.client("bob") as bob, secured.client("operator") as operator:

        async def is_running() -> bool:
            return (await operator.cluster_status()).requests_running == 1

        secured.started.freeze(secured.decode)  # so that his request does not end by itself, however long this takes
        try:
            asking = asyncio.create_task(bob.complete(PROMPT, {"max_tokens": 8}, request_id="the-id-of-bob"))
            await until(is_running)
            assert await alice.abort("the-id-of-bob") == []
            assert await bob.abort("the-id-of-bob") == ["the-id-of-bob"], "it still runs"
            with pytest.raises(BatonError, match="abort"):
                await asking
        finally:
            secured.started.thaw(secured.decode)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Waits, as long as it takes, for what a process does at its next look at its files."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.05)


async def is_refused(client: OperatorClient) -> bool:
    try:
        await client.list_models()
    except Unauthenticated:
        return True
    return False


async def test_a_revoked_key_is_refused_without_a_restart(secured: Secured) -> None:
    secured.write_keys("alice", "operator")
    async with secured.client("bob") as client:
        await until(lambda: is_refused(client))
    async with secured.client("alice") as client:
        assert await client.list_models()


async def test_replaced_certificates_are_used_without_a_restart(secured: Secured, reference: Reference) -> None:
    """All of them at once, from a new CA, so that a process that still used an old one would be refused."""
    async with secured.client("alice") as client:
        await client.list_models()  # with the old CA
        for name in ("ca.key", "ca.crt"):
            (secured.folder / name).unlink()
        write_set(secured.folder, hosts=["127.0.0.1"], days=1)
        new = {role: (secured.folder / f"{role}.crt").read_text() for role in ("prefill", "decode", CLIENTS)}
        http = secured.http.removeprefix("https://")
        shown = {"prefill": secured.prefill.address, "decode": secured.decode.address, CLIENTS: http}
        for role, address in shown.items():
            await until(partial(shows, address, new[role]))
        await until(partial(is_reached, client))
        whole = await client.complete(PROMPT[::-1], {"max_tokens": 8, "temperature": 0, "ignore_eos": True})
    assert [token.token_id for token in whole.tokens] == reference.greedy(PROMPT[::-1], 8).token_ids
    assert await refusal(secured.decode.address, secured.dial(Role.GATEWAY), "drain") is PermissionDenied


async def shows(address: str, certificate: str) -> bool:
    host, _, port = address.rpartition(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port))) == certificate


async def is_reached(client: OperatorClient) -> bool:
    """False until the client has looked at its CA."""
    try:
        return bool(await client.list_models())
    except NoNode:
        return False


async def test_no_log_has_a_key_or_a_prompt(secured: Secured) -> None:
    secret = "my doctor says that"
    async with secured.client("alice") as client:
        await client.complete(secret, {"max_tokens": 2})
        with pytest.raises(InvalidRequest):
            await client.complete("x", {"grammar": Grammar(GrammarKind.REGEX, f"({secret}")})

    async def is_written() -> bool:
        return any("paired" in file.read_text() for file in secured.logs.rglob("std*"))

    await until(is_written)
    for log in [file.read_text() for file in secured.logs.rglob("std*")]:
        assert secret not in log
        assert not [name for name, key in secured.keys.items() if key in log]
        assert "PRIVATE KEY" not in log
