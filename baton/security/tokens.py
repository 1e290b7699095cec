"""Checks signed tokens (JWT), which clients may send in place of API keys."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from jwt.algorithms import AllowedPublicKeys

from baton.core.errors import ConfigError, Unauthenticated
from baton.security.watched import read_file

FIELD = "jwt_keys"
OPERATOR_SCOPE = "baton:operator"
_LEEWAY_S = 10
_SECRET_BYTES_MIN = 32
# A single word, so that an error page saved in place of a key set is not taken for a secret.
_SECRET = re.compile(rb"[A-Za-z0-9+/=_.-]{%d,}" % _SECRET_BYTES_MIN)
_SUBJECT_MAX = 128
_ISSUER_MAX = 256
_WRONG_KEY = (ValueError, TypeError, UnsupportedAlgorithm)  # raised for a key that cannot be read
_CURVES = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}


@dataclass(frozen=True)
class Key:
    """A key that verifies signatures, and the only algorithms that it may be used with."""

    key: AllowedPublicKeys | bytes = field(repr=False)
    algorithms: Sequence[str]


@dataclass(frozen=True)
class Subject:
    """The client that a token names.

    Attributes:
        name: `jwt:SUBJECT`, or `jwt:SUBJECT@ISSUER`, so that equal subjects of two issuers differ.
    """

    name: str
    operator: bool


@dataclass(frozen=True)
class Tokens:
    """Verifies tokens.

    Args:
        keys: keys by id; the only key of a file without ids has the id "".
        audience, issuer: what tokens must name; None: anything.
    """

    keys: Mapping[str, Key]
    audience: str | None
    issuer: str | None

    def subject(self, token: str) -> Subject:
        """Checks a token's signature and times, and returns its subject.

        Raises:
            Unauthenticated: the token is not valid. The error never contains it.
        """
        try:
            key = self._key(jwt.get_unverified_header(token).get("kid"))
            claims = jwt.decode(
                token,
                key.key,
                algorithms=list(key.algorithms),
                audience=self.audience,
                issuer=self.issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "sub"], "verify_aud": self.audience is not None},
            )
        except jwt.ExpiredSignatureError:
            raise _refused("has expired") from None
        except jwt.InvalidAudienceError:
            raise _refused("is for another audience") from None
        except jwt.InvalidIssuerError:
            raise _refused("is from another issuer") from None
        except (jwt.PyJWTError, ValueError, TypeError):
            raise _refused("is not valid") from None
        subject, issuer = claims["sub"], claims.get("iss")
        if not _is_name(subject, _SUBJECT_MAX):
            raise _refused(f"names a subject that is not 1 to {_SUBJECT_MAX} printable characters")
        name = "jwt:" + subject.replace("%", "%25").replace("@", "%40")
        if issuer is not None:
            if not _is_name(issuer, _ISSUER_MAX):
                raise _refused(f"names an issuer that is not 1 to {_ISSUER_MAX} printable characters")
            name = f"{name}@{issuer}"
        scope = claims.get("scope", "")
        return Subject(name, isinstance(scope, str) and OPERATOR_SCOPE in scope.split())

    def _key(self, key_id: object) -> Key:
        if isinstance(key_id, str) and key_id in self.keys:
            return self.keys[key_id]
        if len(self.keys) == 1 and (key_id is None or "" in self.keys):
            return next(iter(self.keys.values()))
        raise _refused("is signed with an unknown key")


def _is_name(claim: object, most: int) -> bool:
    return isinstance(claim, str) and 0 < len(claim) <= most and claim.isprintable()


def _refused(why: str) -> Unauthenticated:
    return Unauthenticated(f"the token {why}", field="authorization", cure="get a new one from its issuer")


def read_tokens(path: Path, *, audience: str | None, issuer: str | None) -> Tokens:
    """Reads a file with a key set (JWKS), a PEM public key, or a secret, which is one word of at least 32 characters.

    Raises:
        ConfigError: the file cannot be read, or contains none of these.
    """
    data = read_file(path, FIELD)
    if data.lstrip().startswith(b"{"):
        keys = _key_set(path, data)
    elif b"-----BEGIN" in data:
        keys = {"": _public_key(path, data)}
    elif _SECRET.fullmatch(secret := data.strip()):
        keys = {"": Key(secret, ("HS256", "HS384", "HS512"))}
    else:
        raise _wrong(
            path, f"has no key set, no PEM public key, and no secret of {_SECRET_BYTES_MIN} or more letters and digits"
        )
    return Tokens(keys, audience, issuer)


def _key_set(path: Path, data: bytes) -> dict[str, Key]:
    try:
        listed = json.loads(data)["keys"]
        found = [jwt.PyJWK(each) for each in listed if each.get("use", "sig") == "sig"]
    except (*_WRONG_KEY, KeyError, AttributeError, RecursionError, jwt.PyJWTError):
        raise _wrong(path, "is not a key set") from None
    keys: dict[str, Key] = {}
    for index, each in enumerate(found):
        if not isinstance(each.key_id, str | None):
            raise _wrong(path, "has a key whose id is not text")
        if isinstance(each.key, bytes) and len(each.key) < _SECRET_BYTES_MIN:
            raise _wrong(path, f"has a secret of fewer than {_SECRET_BYTES_MIN} bytes")
        keys[each.key_id or f"#{index}"] = Key(each.key, (str(each.algorithm_name),))
    if not keys:
        raise _wrong(path, "has no key for signatures")
    return keys


def _public_key(path: Path, data: bytes) -> Key:
    try:
        key: Any = load_pem_public_key(data)
    except _WRONG_KEY:
        raise _wrong(path, "has no usable PEM public key") from None
    if isinstance(key, rsa.RSAPublicKey):
        return Key(key, ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"))
    if isinstance(key, ed25519.Ed25519PublicKey):
        return Key(key, ("EdDSA",))
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _CURVES:
        return Key(key, (_CURVES[key.curve.name],))
    raise _wrong(path, "has a public key of another kind than RSA, Ed25519, P-256, P-384 or P-521")


def _wrong(path: Path, what: str) -> ConfigError:
    message = f"BATON_JWT_KEYS (--jwt-keys): {str(path)!r} {what}"
    return ConfigError(message, field=FIELD, value=path, cure="docs/security.md describes the file")
