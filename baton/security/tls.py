"""gRPC credentials from files, for servers and channels. Changed files take effect at the next handshake or call."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc

from baton.core.errors import ConfigError
from baton.security.channels import KeyedChannel, Options
from baton.security.pem import Files, Pems, WatchedPems
from baton.security.roles import Role, name_of
from baton.security.watched import Watched


class TlsSettings(Protocol):
    """The TLS settings for traffic between processes."""

    @property
    def tls_cert(self) -> Path | None: ...
    @property
    def tls_key(self) -> Path | None: ...
    @property
    def tls_ca(self) -> Path | None: ...


@dataclass(frozen=True)
class InternalTls:
    """Mutual TLS between processes of the cluster."""

    pems: Watched[Pems]

    @classmethod
    def read(cls, settings: TlsSettings, role: Role | None) -> "InternalTls | None":
        """Reads the files that the settings name. Returns None if they name none.

        Args:
            role: this process's role, which its certificate must allow; None: any role.

        Raises:
            ConfigError: the settings name only some of the files, or files that cannot be used together.
        """
        files = Files(settings.tls_cert, settings.tls_key, settings.tls_ca)
        if not files.paths:
            return None
        if len(files.paths) < 3:
            raise ConfigError(
                "only some of BATON_TLS_CERT, BATON_TLS_KEY and BATON_TLS_CA are set", field="tls_cert",
                cure="set all three, or none",
            )  # fmt: skip
        return cls(WatchedPems(files, role=role))

    def server(self) -> grpc.ServerCredentials:
        """Returns server credentials that require a client certificate from the CA."""
        return _server(self.pems, wants_certificate=True)

    def to(self, name: str) -> "Dial":
        """Returns credentials for channels to servers whose certificate has this DNS name, which stands for a role."""
        return Dial(self.pems, server_name=name)

    def to_role(self, role: Role) -> "Dial":
        return self.to(name_of(role))


@dataclass(frozen=True)
class Dial:
    """Credentials with which to open channels.

    Args:
        pems: certificates; None: no TLS.
        server_name: DNS name that the server's certificate must have; empty: the address's host.
        metadata: sent with every call.
    """

    pems: Watched[Pems] | None = None
    server_name: str = ""
    metadata: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def channel(self, address: str, options: Options) -> grpc.aio.Channel:
        """Opens a channel, which uses changed files from the next call on."""
        if self.server_name:
            options = [*options, ("grpc.ssl_target_name_override", self.server_name)]
        if self.pems is None:
            return KeyedChannel(
                lambda _: grpc.aio.insecure_channel(address, options=options), lambda: None, self.metadata
            )
        return KeyedChannel(
            lambda pems: grpc.aio.secure_channel(address, _channel_credentials(pems), options=options),
            self.pems.get,
            self.metadata,
        )


def client_server_credentials(pems: Watched[Pems]) -> grpc.ServerCredentials:
    """Returns credentials of a server whose callers send keys instead of certificates."""
    return _server(pems, wants_certificate=False)


def _server(pems: Watched[Pems], *, wants_certificate: bool) -> grpc.ServerCredentials:
    used = pems.get()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Returns the new configuration if the files changed. gRPC calls this at each handshake, one at a time."""
        nonlocal used
        found = pems.get()
        if found is used:
            return None
        used = found
        return _server_configuration(found)

    fetch: Any = changed  # the type stubs do not allow None as its result
    return grpc.dynamic_ssl_server_credentials(_server_configuration(used), fetch, wants_certificate)


def _server_configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    assert pems.key is not None
    assert pems.cert is not None
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], root_certificates=pems.ca)


def _channel_credentials(pems: Pems) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(pems.ca, private_key=pems.key, certificate_chain=pems.cert)
