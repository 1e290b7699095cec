"""Settings as the parts under test see them."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TlsSettings:
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    insecure: bool = False

    @classmethod
    def of(cls, folder: Path, name: str, *, ca: Path | None = None) -> "TlsSettings":
        return cls(folder / f"{name}.crt", folder / f"{name}.key", ca or folder / "ca.crt")


@dataclass(frozen=True)
class AuthenticatorSettings:
    api_keys: Path | None = None
    jwt_keys: Path | None = None
    jwt_audience: str | None = None
    jwt_issuer: str | None = None
    insecure: bool = False
