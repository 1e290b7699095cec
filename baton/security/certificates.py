"""Makes the certificates of a laptop or a test: a CA, one certificate per role, and one that gateways show to clients.

In a cluster, the cluster's own issuer should make certificates, with the names of `baton.security.roles`.
"""

import ipaddress
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.core.errors import ConfigError
from baton.core.regular_file import check_can_write, write_regular_file
from baton.security.roles import Role, dns_names_of, uri_of

CA_CERT, CA_KEY = "ca.crt", "ca.key"
CLIENTS = "clients"  # name of the certificate that a gateway shows to clients
_DNS_NAME = re.compile(r"(?=.{1,253}$)(\*\.)?([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?\.?)+")
_SKEW = timedelta(minutes=5)  # between the clocks of machines


@dataclass(frozen=True)
class Pair:
    """A certificate and its private key, as PEM."""

    cert: bytes
    key: bytes = field(repr=False)

    def write(self, folder: Path, name: str) -> None:
        """Writes NAME.crt and NAME.key, each in one step. Only the owner may read the key."""
        for suffix, data, mode in ((".key", self.key, 0o600), (".crt", self.cert, 0o644)):
            write_regular_file(folder / f"{name}{suffix}", data, mode=mode)


class Authority:
    """A CA that signs certificates."""

    def __init__(self, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._cert = cert
        self._key = key

    @classmethod
    def new(cls, *, days: float) -> Self:
        key = ec.generate_private_key(ec.SECP256R1())
        # With equal names, a second CA would look like the first one with wrong signatures.
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Baton CA {secrets.token_hex(4)}")])
        builder = _builder(name, name, key.public_key(), timedelta(days=days))
        usage = _usage(signs_certificates=True)
        signed = (
            builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(signed, key)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the CA that `pair.write` wrote to the folder.

        Raises:
            ConfigError: the files contain something else.
        """
        try:
            cert = x509.load_pem_x509_certificate((folder / CA_CERT).read_bytes())
            key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion):
            key = None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            cure = f"remove {CA_CERT} and {CA_KEY} there, or name another folder"
            raise ConfigError(f"the CA in {folder} cannot be used", field="folder", value=folder, cure=cure)
        return cls(cert, key)

    @property
    def pair(self) -> Pair:
        return Pair(_pem(self._cert), _pem_key(self._key))

    def for_role(self, role: Role, *, lifetime: timedelta) -> Pair:
        """Makes a role's certificate, for both ends of traffic between processes. Its lifetime may be negative, for an
        expired one."""
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri_of(role))]
        names += [x509.DNSName(name) for name in dns_names_of(role)]
        return self._sign(role, names, (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH), lifetime)

    def for_hosts(self, hosts: Sequence[str], *, lifetime: timedelta) -> Pair:
        """Makes the certificate of a server with these names and addresses. It names no role, so it grants no right."""
        return self._sign(CLIENTS, [_host(host) for host in hosts], (ExtendedKeyUsageOID.SERVER_AUTH,), lifetime)

    def _sign(
        self, name: str, names: Sequence[x509.GeneralName], uses: Sequence[x509.ObjectIdentifier], lifetime: timedelta
    ) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Baton {name}")])
        signed = (
            _builder(subject, self._cert.subject, key.public_key(), lifetime)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Pair(_pem(signed), _pem_key(key))


def write_set(folder: Path, *, hosts: Sequence[str], days: float) -> None:
    """Writes all certificates into an existing folder, signed by the CA in the folder or by a new one.

    Raises:
        OSError: a file cannot be written; then nothing is written.
    """
    for name in ("ca", *Role, CLIENTS):
        for suffix in (".key", ".crt"):
            check_can_write(folder / f"{name}{suffix}")
    if (folder / CA_KEY).exists() and (folder / CA_CERT).exists():
        authority = Authority.read(folder)
    else:
        authority = Authority.new(days=10 * days)
        authority.pair.write(folder, "ca")
    lifetime = timedelta(days=days)
    for role in Role:
        authority.for_role(role, lifetime=lifetime).write(folder, role)
    authority.for_hosts(hosts, lifetime=lifetime).write(folder, CLIENTS)


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, lifetime: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    begins = now - _SKEW if lifetime > timedelta(0) else now + lifetime - _SKEW
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(now + lifetime)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not _DNS_NAME.fullmatch(host):
            raise ConfigError(
                f"host is {host!r}", field="host", value=host, allowed=("a DNS name", "an address")
            ) from None
        return x509.DNSName(host)


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def _pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
