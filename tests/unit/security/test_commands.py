"""`baton certs`, `baton key` and `baton up --certs`: what they write, and what they pass on."""

import sys
from pathlib import Path

import pytest

from baton.cli import main
from baton.cli.local_cluster import ClusterOptions, _gateway_arguments, _node_arguments
from baton.core.setting_names import CLIENT_VARIABLES
from baton.gateway.process.process import check_doors
from baton.rpc.secure_server import protect_node
from baton.rpc.server import ListenAddress
from baton.security.keys import read_keys
from baton.security.roles import Role
from baton.settings.environment import client_access
from baton.settings.gateway_config import GatewaySettings
from baton.settings.node_config import DecodeSettings, PrefillSettings
from baton.settings.reader import read_settings

WIDE = ListenAddress("0.0.0.0", 7001)


def baton(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["baton", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


def test_a_set_of_certificates_protects_every_process_of_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "certs"
    assert baton(monkeypatch, "certs", str(folder), "--host", "example.com") == 0
    options = ClusterOptions(certs=folder)
    prefill = read_settings(PrefillSettings, "prefill_node", _node_arguments(options, "prefill", 0))
    decode = read_settings(DecodeSettings, "decode_node", _node_arguments(options, "decode", 0))
    assert protect_node(prefill, Role.PREFILL, WIDE).credentials is not None
    assert protect_node(decode, Role.DECODE, WIDE).credentials is not None
    gateway = read_settings(GatewaySettings, "gateway", _gateway_arguments(options, [], []))
    check_doors(gateway.model_copy(update={"listen": "0.0.0.0:7000", "http_listen": "[::]:8000"}))


def test_a_key_is_printed_once_and_kept_as_a_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.toml"
    for name, flags in (("alice", ()), ("admin", ("--operator",))):
        assert baton(monkeypatch, "key", name, "--file", str(file), *flags) == 0
    alice, admin = capsys.readouterr().out.split()
    assert alice not in file.read_text()
    owners = [read_keys(file).owner(key) for key in (alice, admin)]
    assert [owner and (owner.name, owner.operator) for owner in owners] == [("alice", False), ("admin", True)]


@pytest.mark.parametrize(("name", "why"), [("alice", "already has a key of alice"), ("a b\n", "cannot name the owner")])
def test_a_name_that_is_taken_or_wrong_leaves_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, why: str
) -> None:
    file = tmp_path / "keys.toml"
    assert baton(monkeypatch, "key", "alice", "--file", str(file)) == 0
    before = file.read_text()
    assert baton(monkeypatch, "key", name, "--file", str(file)) == 1
    assert why in capsys.readouterr().err
    assert file.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["keys.toml"]


def test_a_switch_may_stand_alone() -> None:
    for flags, given in ((["--insecure"], True), (["--insecure", "false"], False), ([], False)):
        assert read_settings(DecodeSettings, "decode_node", flags).insecure is given


def test_the_variables_of_clients_disturb_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`baton up` passes its environment on, and BATON_API_KEY is nearly the name of a gateway's setting."""
    for name in CLIENT_VARIABLES:
        monkeypatch.setenv(name, "given")
    assert read_settings(GatewaySettings, "gateway", []).api_keys is None
    assert client_access().api_key == client_access().tls_ca == "given"
