"""A cluster under mutual TLS whose gateway wants keys: it serves as any other, and refuses everybody else, typed."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from baton.cli.processes import Process
from baton.client import Client
from baton.security.certificates import CLIENTS, write_set
from baton.security.keys import entry, new_key
from baton.security.pem import Files, read_pems
from baton.security.roles import NODE, Role
from baton.security.tls import Dial
from baton.security.watched import Watched
from tests.integration.cluster import Flags, Machines, machines
from tests.integration.reference import Reference

PROMPT = list(range(5, 69))
DAY = timedelta(days=1)
LOOK_S = 1.0  # between two looks at files


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

    def client(self, name: str | None) -> Client:
        return Client(self.gateway.address, api_key=self.keys[name] if name else None, tls_ca=self.folder / "ca.crt")

    def dial(self, role: Role, *, to: str = NODE) -> Dial:
        return dial_with(self.folder, role, to=to)

    def write_keys(self, *names: str) -> None:
        write_keys(self.folder, self.keys, *names)


def dial_with(folder: Path, name: str, *, to: str = NODE) -> Dial:
    files = Files(folder / f"{name}.crt", folder / f"{name}.key", folder / "ca.crt")
    return Dial(Watched(files.paths, lambda: read_pems(files)), server_name=to)


def write_keys(folder: Path, keys: dict[str, str], *names: str) -> None:
    lines = [entry(name, keys[name], operator=name == "operator") for name in names]
    temporary = folder / "keys.part"
    temporary.write_text("\n".join(lines))
    temporary.replace(folder / "keys.toml")


def own(folder: Path, role: str) -> Flags:
    return {"tls_cert": folder / f"{role}.crt", "tls_key": folder / f"{role}.key", "tls_ca": folder / "ca.crt"}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder, logs = tmp_path_factory.mktemp("certs"), tmp_path_factory.mktemp("logs")
    write_set(folder, hosts=["127.0.0.1"], days=1)
    keys = {name: new_key() for name in ("alice", "bob", "operator")}
    write_keys(folder, keys, *keys)
    with machines() as started:
        prefill, decode = started.nodes(
            ("prefill", own(folder, "prefill")), ("decode", own(folder, "decode")), outputs=logs
        )
        doors = {
            "client_tls_cert": folder / f"{CLIENTS}.crt",
            "client_tls_key": folder / f"{CLIENTS}.key",
            "api_keys": folder / "keys.toml",
        }
        gateway = started.gateway([prefill], [decode], **own(folder, "gateway"), **doors)
        yield Secured(folder, started, prefill, decode, gateway, keys, logs)


async def test_a_client_with_a_key_gets_the_tokens_of_the_reference(secured: Secured, reference: Reference) -> None:
    async with secured.client("alice") as client:
        whole = await client.complete(PROMPT, {"max_tokens": 12, "temperature": 0, "ignore_eos": True})
    assert [token.token_id for token in whole.tokens] == reference.greedy(PROMPT, 12)
    assert whole.receipt.path.value == "remote"
