"""Makes the protection of each kind of server from its process's settings."""

from dataclasses import dataclass
from typing import Protocol

import grpc

from baton.core.errors import ConfigError
from baton.rpc.guard import CertificateGuard, ClientGuard, Guard, OpenGuard
from baton.security.authenticator import Authenticator
from baton.security.exposure import Address, check_exposed
from baton.security.pem import Files, Pems, WatchedPems
from baton.security.roles import Role
from baton.security.tls import InternalTls, TlsSettings, client_server_credentials
from baton.security.watched import Watched


@dataclass(frozen=True)
class Protection:
    """The protection of one server: its credentials, or None without TLS, and the guard that identifies its callers."""

    credentials: grpc.ServerCredentials | None
    guard: Guard


def check_certificate(settings: TlsSettings, role: Role) -> None:
    """Checks that a process with these files may have the role.

    Raises:
        ConfigError: its certificate does not allow the role.
    """
    InternalTls.read(settings, role)


class ServerSettings(TlsSettings, Protocol):
    """Settings of a node's server."""

    @property
    def insecure(self) -> bool: ...


def protect_node(settings: ServerSettings, role: Role, where: Address) -> Protection:
    """The protection of a node's server, which other processes of the cluster call.

    Raises:
        ConfigError: the files of the settings cannot be used, or other machines would reach a server without TLS.
    """
    tls = InternalTls.read(settings, role)
    check_exposed(where, field="listen", tls=tls is not None, tls_field="tls_cert", insecure=settings.insecure)
    return Protection(None, OpenGuard()) if tls is None else Protection(tls.server(), CertificateGuard())


def protect_client_server(pems: Watched[Pems] | None, authenticator: Authenticator) -> Protection:
    """The protection of a gateway's server, which clients call."""
    return Protection(None if pems is None else client_server_credentials(pems), ClientGuard(authenticator))


def watch_client_pems(files: Files) -> Watched[Pems] | None:
    """The certificate and key that a gateway shows its clients. Returns None if the settings name no files.

    Raises:
        ConfigError: the settings name only one of the two, or files that do not fit together.
    """
    if not files.paths:
        return None
    if len(files.paths) < 2:
        raise ConfigError(
            "only one of BATON_CLIENT_TLS_CERT and BATON_CLIENT_TLS_KEY is set", field=files.cert_field,
            cure="set both or neither",
        )  # fmt: skip
    return WatchedPems(files)
