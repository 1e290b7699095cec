"""Mutual TLS between the hosts of one node, each with a certificate of the node's role.

Files are read once, because the connections live as long as the processes at their ends.
"""

import ssl
from dataclasses import dataclass
from typing import Any

from baton.core.errors import BatonError, ConfigError
from baton.security.pem import Files, read_pems
from baton.security.roles import Role, allows, name_of, role_of
from baton.security.tls import TlsSettings


@dataclass(frozen=True)
class PeerTls:
    """The TLS contexts of one host of a node."""

    role: Role
    server: ssl.SSLContext
    client: ssl.SSLContext

    @classmethod
    def read(cls, settings: TlsSettings, role: Role) -> "PeerTls":
        """Reads the files that BATON_TLS_CERT, BATON_TLS_KEY and BATON_TLS_CA name.

        Raises:
            ConfigError: a file is not named or cannot be used, or the files do not belong together.
        """
        files = Files(settings.tls_cert, settings.tls_key, settings.tls_ca)
        if len(files.paths) < 3:
            raise ConfigError(
                "the hosts of a node need BATON_TLS_CERT, BATON_TLS_KEY and BATON_TLS_CA, because each host runs what "
                "another one sends",
                field="tls_cert",
                cure="set all three; `baton certs` makes the files",
            )
        read_pems(files, role=role)
        return cls(role, _context(files, ssl.PROTOCOL_TLS_SERVER), _context(files, ssl.PROTOCOL_TLS_CLIENT))

    @property
    def name(self) -> str:
        """The DNS name that the server's certificate must have."""
        return name_of(self.role)

    def admits(self, certificate: dict[str, Any] | None) -> bool:
        """Whether the peer's certificate, from `getpeercert()`, allows this role."""
        names = (certificate or {}).get("subjectAltName", ())
        try:
            return allows(role_of(value for kind, value in names if kind == "URI"), self.role)
        except BatonError:
            return False


def _context(files: Files, protocol: int) -> ssl.SSLContext:
    assert files.cert is not None
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(files.cert, files.key)
    context.load_verify_locations(files.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    return context
