"""Reads the file of API keys: a table with the key's hash, the rights and the limits of each owner.

    [limits]                       # of owners without limits of their own, and of tokens (JWT)
    concurrent = 64

    [keys.alice]
    sha256 = "b2c4..."             # or a list, while a key is being replaced
    tokens_per_minute = 200000

    [keys.admin]
    sha256 = "91fe..."
    operator = true

A key has 256 random bits and cannot be guessed, so one round of SHA-256 protects it.
"""

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from baton.core.errors import ConfigError
from baton.security.limits import Limits
from baton.security.watched import read_file

FIELD = "api_keys"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LIMITS = tuple(field.name for field in fields(Limits))


@dataclass(frozen=True)
class Owner:
    """The owner of a key."""

    name: str
    operator: bool
    limits: Limits


@dataclass(frozen=True)
class KeyFile:
    """The owners, by the SHA-256 digests of their keys."""

    owners: Mapping[bytes, Owner]
    default_limits: Limits

    def owner(self, key: str) -> Owner | None:
        """Returns the key's owner, or None. Takes the same time for every key, so its timing reveals no digest."""
        digest = hashlib.sha256(key.encode(errors="replace")).digest()
        found = None
        for known, owner in self.owners.items():
            if hmac.compare_digest(known, digest):
                found = owner
        return found


def new_key() -> str:
    return f"baton-{secrets.token_urlsafe(32)}"


def entry(name: str, key: str, *, operator: bool) -> str:
    """Returns the file's lines for a new key.

    Raises:
        ConfigError: the name is not allowed.
    """
    _check_name(name)
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f'[keys."{name}"]\nsha256 = "{digest}"\n' + ("operator = true\n" if operator else "")


def read_keys(path: Path) -> KeyFile:
    """Reads the file of API keys.

    Raises:
        ConfigError: the file cannot be read, or is not a table of keys.
    """
    return parse_keys(read_file(path, FIELD), path)


def parse_keys(data: bytes, path: Path) -> KeyFile:
    """Parses the content of a file of API keys.

    Args:
        path: the file, for errors.

    Raises:
        ConfigError: the content is not a table of keys.
    """
    try:
        table = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # also for wrong UTF-8 and for a number of 5,000 digits
        raise _wrong(path, f"is not TOML: {error}") from None
    if unknown := set(table) - {"limits", "keys"}:
        raise _wrong(path, f"has a table {sorted(unknown)[0]!r}")
    default_limits = _limits(path, "limits", _table(path, "limits", table.get("limits", {})), Limits())
    owners: dict[bytes, Owner] = {}
    for name, value in _table(path, "keys", table.get("keys", {})).items():
        _check_name(name)
        given = _table(path, f"keys.{name}", value)
        digests, operator = given.pop("sha256", None), given.pop("operator", False)
        if not isinstance(operator, bool):
            raise _wrong(path, f"has keys.{name}.operator, which is not true or false")
        owner = Owner(name, operator, _limits(path, f"keys.{name}", given, default_limits))
        listed = digests if isinstance(digests, list) else [digests] if digests is not None else []
        for digest in listed:
            if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
                raise _wrong(path, f"has keys.{name}.sha256, which is not 64 lower-case hexadecimal digits")
            if owners.setdefault(bytes.fromhex(digest), owner) is not owner:
                raise _wrong(path, f"has the same key for {owners[bytes.fromhex(digest)].name} and {name}")
    return KeyFile(owners, default_limits)


def _limits(path: Path, where: str, given: Mapping[str, Any], default: Limits) -> Limits:
    for name, value in given.items():
        if name not in _LIMITS:
            allowed = ", ".join(("sha256", "operator", *_LIMITS))
            raise _wrong(path, f"has {where}.{name}; allowed: {allowed}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _wrong(path, f"has {where}.{name}, which is not a whole number of at least 1")
    return Limits(**{name: given.get(name, getattr(default, name)) for name in _LIMITS})


def _table(path: Path, name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(path, f"has {name}, which is not a table")
    return dict(value)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        allowed = ("1 to 64 letters, digits, dots, dashes and underscores",)
        raise ConfigError(f"{name!r} cannot name the owner of a key", field="name", value=name, allowed=allowed)


def _wrong(path: Path, what: str) -> ConfigError:
    message = f"BATON_API_KEYS (--api-keys): {str(path)!r} {what}"
    return ConfigError(message, field=FIELD, value=path, cure="docs/security.md describes the file")
