"""Files of certificates: what is refused at start, what is taken later; and log lines."""

import logging
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest

from baton.core.errors import ConfigError, Unauthenticated
from baton.rpc.secure_server import check_certificate, protect_node, watch_client_pems
from baton.rpc.server import ListenAddress
from baton.security.access import dial_gateway, is_local
from baton.security.certificates import CLIENTS, Authority, write_set
from baton.security.http_tls import http_context
from baton.security.keys import entry, read_keys
from baton.security.pem import Files, WatchedPems, read_pems
from baton.security.roles import Role, role_of
from baton.security.tls import InternalTls
from baton.security.watched import Watched
from tests.unit.security.settings import TlsSettings

DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    write_set(folder, hosts=["127.0.0.1"], days=1)
    return folder


def test_only_the_owner_reads_keys(certs: Path) -> None:
    modes = {path.suffix: path.stat().st_mode & 0o777 for path in certs.iterdir()}
    assert modes[".key"] == 0o600
    assert {path.name for path in certs.iterdir()} == {
        f"{name}{suffix}" for name in ("ca", CLIENTS, *Role) for suffix in (".crt", ".key")
    }


def test_a_set_that_is_made_again_keeps_its_ca(certs: Path, tmp_path: Path) -> None:
    for name in ("ca.crt", "ca.key"):
        (tmp_path / name).write_bytes((certs / name).read_bytes())
    write_set(tmp_path, hosts=["localhost"], days=1)
    assert (tmp_path / "ca.crt").read_bytes() == (certs / "ca.crt").read_bytes()
    assert (tmp_path / "decode.crt").read_bytes() != (certs / "decode.crt").read_bytes()


def test_a_folder_with_another_ca_or_a_host_that_is_none_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="host is 'a b'"):
        write_set(tmp_path, hosts=["a b"], days=1)
    (tmp_path / "ca.crt").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"the CA in .* cannot be used"):
        write_set(tmp_path, hosts=[], days=1)


def test_no_pipe_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is not a regular file"):
        read_keys(tmp_path / "pipe")


def test_a_process_takes_its_own_certificate_and_no_other(certs: Path) -> None:
    assert InternalTls.read(TlsSettings.of(certs, "decode"), Role.DECODE) is not None
    with pytest.raises(ConfigError, match="the certificate of a prefill, not of a decode"):
        InternalTls.read(TlsSettings.of(certs, "prefill"), Role.DECODE)
    with pytest.raises(ConfigError, match="names no role, or several; allowed: spiffe://baton/decode"):
        InternalTls.read(TlsSettings.of(certs, CLIENTS), Role.DECODE)


def test_a_certificate_of_a_node_is_for_both_roles_of_nodes_and_no_other(certs: Path) -> None:
    settings = TlsSettings.of(certs, "node")
    for role in (Role.PREFILL, Role.DECODE):
        check_certificate(settings, role)
    for role in (Role.GATEWAY, Role.OPERATOR):
        with pytest.raises(ConfigError, match=f"the certificate of a node, not of a {role}"):
            check_certificate(settings, role)
    with pytest.raises(ConfigError, match="the certificate of a prefill, not of a decode"):
        check_certificate(TlsSettings.of(certs, "prefill"), Role.DECODE)


def test_what_does_not_fit_is_a_wrong_setting(certs: Path, tmp_path: Path) -> None:
    crt, key, ca = certs / "decode.crt", certs / "decode.key", certs / "ca.crt"
    with pytest.raises(ConfigError, match=r"BATON_TLS_KEY .* is not the key of the certificate"):
        read_pems(Files(crt, certs / "prefill.key", ca))
    with pytest.raises(ConfigError, match=r"BATON_TLS_CERT .* has no certificate"):
        read_pems(Files(key, key, ca))
    with pytest.raises(ConfigError, match=r"BATON_TLS_KEY .* has no private key"):
        read_pems(Files(crt, crt, ca))
    with pytest.raises(ConfigError, match=r"BATON_TLS_CA .* cannot be read: No such file"):
        read_pems(Files(crt, key, tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"only some of"):
        InternalTls.read(TlsSettings(crt, None, ca), None)
    with pytest.raises(ConfigError, match=r"only one of"):
        watch_client_pems(Files(crt, None, None, "client_tls_cert", "client_tls_key"))
    Authority.read(certs).for_role(Role.DECODE, lifetime=-DAY).write(tmp_path, "old")
    with pytest.raises(ConfigError, match=r"which expired at 20"):
        read_pems(Files(tmp_path / "old.crt", tmp_path / "old.key", ca))


def test_files_that_fit_no_more_leave_the_old_ones_in_use(certs: Path, tmp_path: Path) -> None:
    """As between the two writes of somebody who replaces certificate and key one after the other."""
    for name in ("decode.crt", "decode.key", "ca.crt"):
        (tmp_path / name).write_bytes((certs / name).read_bytes())
    files = Files(tmp_path / "decode.crt", tmp_path / "decode.key", tmp_path / "ca.crt")
    watched = Watched(files.paths, lambda: read_pems(files), look_every_s=0)
    before = watched.get()
    new = Authority.read(certs).for_role(Role.DECODE, lifetime=DAY)
    (tmp_path / "decode.crt").write_bytes(new.cert)
    os.utime(tmp_path / "decode.crt", (1, 1))  # the clock of the file system may not have moved
    assert watched.get() is before
    (tmp_path / "decode.key").write_bytes(new.key)
    os.utime(tmp_path / "decode.key", (1, 1))
    assert (watched.get().cert, watched.get().key) == (new.cert, new.key)


def test_files_behind_a_link_that_is_exchanged_are_new(tmp_path: Path) -> None:
    """As Kubernetes replaces a mounted secret."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "key").write_text(name)
        os.utime(tmp_path / name / "key", (0, 0))
    (tmp_path / "data").symlink_to("one")
    path = tmp_path / "data" / "key"
    watched = Watched([path], path.read_text, look_every_s=0)
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").replace(tmp_path / "data")
    assert watched.get() == "two"


@pytest.mark.parametrize(
    "uris",
    [[], ["spiffe://baton/root"], ["spiffe://other/decode"], ["spiffe://baton/decode", "spiffe://baton/gateway"]],
)
def test_a_certificate_names_exactly_one_role(uris: list[str]) -> None:
    with pytest.raises(Unauthenticated):
        role_of(uris)
    assert role_of(["https://example.com", "spiffe://baton/decode"]) is Role.DECODE


def test_other_machines_are_served_with_tls_or_on_purpose(certs: Path) -> None:
    wide, near = ListenAddress("0.0.0.0", 7001), ListenAddress("127.0.0.1", 7001)
    with pytest.raises(ConfigError, match=r"BATON_LISTEN \(--listen\) is at 0.0.0.0.*`baton certs`.*--insecure"):
        protect_node(TlsSettings(), Role.DECODE, wide)
    assert protect_node(TlsSettings(), Role.DECODE, near).credentials is None
    assert protect_node(TlsSettings(insecure=True), Role.DECODE, wide).credentials is None
    assert protect_node(TlsSettings.of(certs, "decode"), Role.DECODE, wide).credentials is not None


def test_a_key_crosses_no_network_unencrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATON_API_KEY", "BATON_CLIENT_CA", "BATON_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"10.0.0.9:7000 unencrypted"):
        dial_gateway("10.0.0.9:7000", api_key="k")
    assert dial_gateway("10.0.0.9:7000") is None
    dial = dial_gateway("127.0.0.1:7000", api_key="my-key")
    assert dial is not None
    assert "my-key" not in repr(dial)
    monkeypatch.setenv("BATON_INSECURE", "true")
    assert dial_gateway("10.0.0.9:7000", api_key="k") is not None
    local = ["unix:/run/s", "dns:///localhost:1", "[::1]:7"]
    assert [is_local(each) for each in [*local, "dns:///example.com:1", "evil:7000"]] == [True] * 3 + [False] * 2


def test_a_changed_file_with_a_wrong_type_leaves_the_old_value(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry("alice", "baton-key", operator=False))
    keys = Watched([file], lambda: read_keys(file), look_every_s=0.0)
    file.write_text("[keys.alice]\nsha256 = 5\n")
    assert keys.get().owner("baton-key") is not None


def test_a_certificate_that_nobody_renews_is_warned_of_before_and_after_it_expires(
    certs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Peers refuse it without a reason, so the process itself has to name it."""
    authority, files = Authority.read(certs), Files(tmp_path / "decode.crt", tmp_path / "decode.key", certs / "ca.crt")
    authority.for_role(Role.DECODE, lifetime=DAY).write(tmp_path, "decode")
    watched = WatchedPems(files, role=Role.DECODE, look_every_s=0)
    valid = watched.get().valid
    assert valid is not None
    assert not caplog.records
    assert valid.warning(valid.expires - DAY / 5) is None
    soon, gone = valid.warning(valid.expires - DAY / 20), valid.warning(valid.expires)
    assert soon is not None
    assert gone is not None
    assert str(files.cert) in soon
    assert "which expires at 20" in soon
    assert "which expired at 20" in gone
    # Begun five minutes ago, so the rest is less than a tenth.
    authority.for_role(Role.DECODE, lifetime=timedelta(seconds=20)).write(tmp_path, "decode")
    os.utime(tmp_path / "decode.crt", (1, 1))  # the clock of the file system may not have moved
    caplog.set_level(logging.WARNING, "baton")
    for _ in range(3):
        watched.get()
    (record,) = [record for record in caplog.records if "which expire" in record.message]
    assert "renew it in place" in record.message


def test_an_http_context_needs_no_room_on_a_disk(certs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full /tmp would end every handshake after a renewal."""
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    files = Files(certs / f"{CLIENTS}.crt", certs / f"{CLIENTS}.key", None)
    assert http_context(WatchedPems(files)).get_ca_certs() == []
