"""grpcurl needs an address and nothing else: reflection describes the rest."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.cli.processes import Process
from baton.gateway.grpc.services import SERVICE_NAMES
from tests.clients.install import CLIENTS
from tests.integration.cluster import DEADLINE_S, LLAMA, machines

Grpcurl = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def gateway() -> Iterator[Process]:
    with machines() as start:
        nodes = start.nodes(("decode", {"model": LLAMA}))
        yield start.gateway([], nodes, model=LLAMA)


@pytest.fixture
def grpcurl(gateway: Process) -> Grpcurl:
    """Runs grpcurl with flags, the gateway's address, and what to do there."""

    def run(*what: str, flags: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
        command: list[str | Path] = [
            CLIENTS / "python" / "bin" / "grpcurl",
            "-plaintext",
            *flags,
            gateway.address,
            *what,
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)

    return run


def test_it_lists_and_describes_every_service(grpcurl: Grpcurl) -> None:
    assert set(SERVICE_NAMES) < set(grpcurl("list").stdout.split())
    for name in (*SERVICE_NAMES, "baton.v1.Generation.Complete", "baton.v1.GenerateRequest"):
        done = grpcurl("describe", name)
        assert done.returncode == 0, done.stderr


def test_it_generates_text(grpcurl: Grpcurl) -> None:
    body = json.dumps({"text": "The town had", "sampling": {"temperature": 0, "max_tokens": 4}})
    whole = json.loads(grpcurl("baton.v1.Generation/Complete", flags=("-d", body)).stdout)
    assert len(whole["outputs"][0]["tokens"]) == 4
    body = json.dumps({"tokenized": {"input_ids": [5, 6]}, "sampling_params": {"max_tokens": 3}})
    engine = json.loads(grpcurl("vllm.grpc.engine.VllmEngine/Generate", flags=("-d", body)).stdout)
    assert len(engine["complete"]["output_ids"]) == 3


def test_it_shows_the_request_id_and_the_details_of_an_error(grpcurl: Grpcurl) -> None:
    body = json.dumps({"text": "x", "sampling": {"top_p": 2}})
    flags = ("-d", body, "-H", "x-request-id: mine")
    done = grpcurl("baton.v1.Generation/Complete", flags=flags)
    assert done.returncode == 64 + 3  # INVALID_ARGUMENT
    assert '"field":"top_p"' in done.stderr
    assert '"request_id":"mine"' in done.stderr


def test_health_is_listed(grpcurl: Grpcurl) -> None:
    statuses = json.loads(grpcurl("grpc.health.v1.Health/List").stdout)["statuses"]
    assert {statuses[name]["status"] for name in SERVICE_NAMES} == {"SERVING"}
