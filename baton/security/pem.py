"""Reads certificates and keys from the files that settings name, and checks that they belong together."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

from baton.core.errors import ConfigError, Unauthenticated
from baton.core.setting_names import flag, variable
from baton.security.roles import Role, allows, dns_names_of, role_of, uri_of
from baton.security.watched import LOOK_EVERY_S, Watched, read_file

log = logging.getLogger("baton")

_UNREADABLE = (
    ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion, x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)  # fmt: skip


@dataclass(frozen=True)
class Files:
    """Paths of a certificate chain, its key, and the CA of the peers' certificates; with the settings' names."""

    cert: Path | None
    key: Path | None
    ca: Path | None
    cert_field: str = "tls_cert"
    key_field: str = "tls_key"
    ca_field: str = "tls_ca"

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.cert, self.key, self.ca) if path is not None)


@dataclass(frozen=True)
class Pems:
    """The content of the files; None for a file that is not named."""

    cert: bytes | None
    key: bytes | None = field(repr=False)
    ca: bytes | None
    valid: "Validity | None" = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Validity:
    """When the process's own certificate is valid, for a warning before it expires.

    Args:
        where: the setting and its file, as in errors.
    """

    where: str
    begins: datetime
    expires: datetime

    def warning(self, now: datetime) -> str | None:
        """What to warn of: the last tenth of the lifetime, in which nobody has renewed it, and the time after it."""
        renewal = "renew it in place; no restart is needed"
        if now >= self.expires:
            return f"{self.where}, which expired at {_utc(self.expires)}: peers refuse new connections; {renewal}"
        if now >= self.expires - (self.expires - self.begins) / 10:
            return f"{self.where}, which expires at {_utc(self.expires)}; {renewal}"
        return None


def read_pems(files: Files, *, role: Role | None = None) -> Pems:
    """Reads and checks all files.

    Args:
        role: role that the certificate must allow; None: any role or none.

    Raises:
        ConfigError: a file cannot be read, certificate and key do not match, or the certificate has expired or is for
            another role.
    """
    ca = None
    if files.ca is not None:
        ca = read_file(files.ca, files.ca_field)
        _certificates(ca, files.ca, files.ca_field)
    if files.cert is None or files.key is None:
        return Pems(None, None, ca)
    cert, key = read_file(files.cert, files.cert_field), read_file(files.key, files.key_field)
    own = _certificates(cert, files.cert, files.cert_field)[0]
    with _readable(files.cert, files.cert_field, "has a certificate that cannot be read"):
        public_key = _der(own.public_key())
        where = _setting(files.cert_field, files.cert)
        valid = Validity(where, own.not_valid_before_utc, own.not_valid_after_utc)
    _check_key(public_key, key, files)
    if valid.expires < datetime.now(UTC):
        message = f"{where}, which expired at {_utc(valid.expires)}"
        raise ConfigError(message, field=files.cert_field, cure="renew it; `baton certs` makes a set for a laptop")
    if role is not None:
        _check_role(own, role, files.cert, files.cert_field)
    return Pems(cert, key, ca, valid=valid)


class WatchedPems(Watched[Pems]):
    """Certificate files that are read again when they change. Logs once when the own certificate should have been
    renewed, and once when it has expired: the peers' refusals name no reason."""

    def __init__(self, files: Files, *, role: Role | None = None, look_every_s: float = LOOK_EVERY_S) -> None:
        self._logged: str | None = None
        super().__init__(files.paths, lambda: read_pems(files, role=role), look_every_s=look_every_s)

    def get(self) -> Pems:
        pems = super().get()
        warning = None if pems.valid is None else pems.valid.warning(datetime.now(UTC))
        if warning is not None and warning != self._logged:
            self._logged = warning
            log.warning("%s", warning)
        return pems


def _certificates(data: bytes, path: Path, field: str) -> list[x509.Certificate]:
    with _readable(path, field, "has no certificate"), warnings.catch_warnings(action="ignore"):
        return x509.load_pem_x509_certificates(data)


@contextmanager
def _readable(path: Path, field: str, else_: str) -> Iterator[None]:
    """Converts parsing errors to a ConfigError that names the setting and the file.

    Attributes of a certificate also belong inside the block, because they are parsed on access.

    Raises:
        ConfigError: the data cannot be parsed.
    """
    try:
        yield
    except _UNREADABLE:
        cure = "name a file with PEM certificates"
        raise ConfigError(f"{_setting(field, path)}, which {else_}", field=field, cure=cure) from None


def _check_key(of_certificate: bytes, key: bytes, files: Files) -> None:
    assert files.key is not None
    where = _setting(files.key_field, files.key)
    try:
        public = _der(serialization.load_pem_private_key(key, password=None).public_key())
    except _UNREADABLE:
        cure = "name a file with an unencrypted PEM key"
        raise ConfigError(f"{where}, which has no private key", field=files.key_field, cure=cure) from None
    if public != of_certificate:
        message = f"{where}, which is not the key of the certificate {str(files.cert)!r}"
        raise ConfigError(message, field=files.key_field, cure="name the two files that were made together")


def _der(key: PublicKeyTypes) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _check_role(cert: x509.Certificate, role: Role, path: Path, field: str) -> None:
    where = _setting(field, path)
    uris: list[str] = []
    dns: list[str] = []
    with _readable(path, field, "has a certificate that cannot be read"), suppress(x509.ExtensionNotFound):
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        dns = names.get_values_for_type(x509.DNSName)
    cure = "name this role's certificate; docs/security.md says what it must have"
    try:
        found = role_of(uris)
    except Unauthenticated:
        message = f"{where}, whose certificate names no role, or several"
        raise ConfigError(message, field=field, allowed=(uri_of(role),), cure=cure) from None
    if not allows(found, role):
        message = f"{where}, which is the certificate of a {found}, not of a {role}"
        raise ConfigError(message, field=field, value=found, allowed=(role,), cure=cure)
    if missing := set(dns_names_of(found)) - set(dns):
        message = f"{where}, which lacks the DNS name {', '.join(sorted(missing))}"
        raise ConfigError(message, field=field, cure=cure)


def _utc(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M} UTC"


def _setting(field: str, path: Path) -> str:
    return f"{variable(field)} ({flag(field)}) is {str(path)!r}"
