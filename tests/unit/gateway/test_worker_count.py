"""How many worker processes a gateway has by default, on which machine."""

import socket

import pytest

from baton.gateway.process.worker_count import WORKERS_MAX, GatewayHost, choose_workers, is_of_this_host
from baton.settings.config import MIB
from baton.settings.gateway_config import GatewaySettings
from baton.settings.reader import read_settings

GIB = 1024 * MIB


@pytest.mark.parametrize(
    ("cores", "memory_mib", "workers"),
    [
        (0.5, 8192, 1),
        (1, 8192, 1),
        (2, 8192, 1),
        (4, 8192, 2),
        (8, 8192, 4),
        (64, 65536, 8),
        (64, 512, 1),
        (64, 2048, 4),
    ],
)
def test_a_gateway_alone_has_a_worker_for_every_two_cores_and_512_mib(
    cores: float, memory_mib: int, workers: int
) -> None:
    assert choose_workers(GatewayHost(cores, memory_mib * MIB)).workers == workers


@pytest.mark.parametrize(
    ("cores", "gpus", "nodes", "workers"),
    [
        (2, 0, 2, 1),  # a laptop
        (16, 0, 2, 1),  # a larger one: nodes without a GPU make fewer tokens than one worker sends
        (16, 1, 1, 2),
        (16, 2, 2, 4),
        (8, 2, 2, 1),  # the nodes need all of it
        (4, 4, 4, 1),
        (128, 8, 8, WORKERS_MAX),
        (16, 1, 4, 1),  # nodes that share a GPU
    ],
)
def test_nodes_on_the_same_host_keep_their_cores(cores: float, gpus: int, nodes: int, workers: int) -> None:
    assert choose_workers(GatewayHost(cores, 256 * GIB, gpus, nodes)).workers == workers


def test_the_reason_names_the_bound_that_holds() -> None:
    assert choose_workers(GatewayHost(64, 512 * MIB)).why == "one for every 512 MiB"
    assert choose_workers(GatewayHost(4, 64 * GIB)).why == "one for every two cores"
    assert choose_workers(GatewayHost(16, 64 * GIB, nodes=2)).why == "two for each GPU of this host"
    assert choose_workers(GatewayHost(10, 64 * GIB, gpus=2, nodes=2)).why == "nodes on this host share its cores"


def test_addresses_of_this_machine_are_known_without_a_name_server() -> None:
    for host in ("127.0.0.1", "localhost", socket.gethostname()):
        assert is_of_this_host(host), host
    for host in ("192.0.2.1", "[2001:db8::1]", "decode.example"):
        assert not is_of_this_host(host), host


def test_only_nodes_with_an_address_of_this_machine_count_as_here() -> None:
    settings = GatewaySettings(prefill="127.0.0.1:1,192.0.2.1:1", decode="localhost:2,k8s://a/b:c,file:///list")
    assert GatewayHost.of_this_process(settings).nodes == 2


def test_a_gateway_that_has_not_chosen_yet_counts_as_one_process() -> None:
    assert GatewaySettings().processes == 1
    assert GatewaySettings(workers=3).processes == 3


def test_auto_is_the_default_and_can_take_the_place_of_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_WORKERS", "6")
    assert read_settings(GatewaySettings, "gateway", []).workers == 6
    assert read_settings(GatewaySettings, "gateway", ["--workers", "auto"]).workers is None
    monkeypatch.setenv("BATON_WORKERS", "auto")
    assert read_settings(GatewaySettings, "gateway", []).workers is None
    assert read_settings(GatewaySettings, "gateway", ["--workers", "2"]).workers == 2


@pytest.mark.parametrize("wrong", ["0", "65", "many", ""])
def test_another_word_or_number_names_the_setting(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(GatewaySettings, "gateway", ["--workers", wrong])
    assert "workers" in capsys.readouterr().err
