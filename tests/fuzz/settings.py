"""Targets: settings, key files, certificates and tokens."""

import base64
import contextlib
import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pydantic import ValidationError

from baton.core.errors import ConfigError, InternalError
from baton.core.setting_names import flag, variable
from baton.security.certificates import Authority
from baton.security.keys import entry, read_keys
from baton.security.pem import Files, read_pems
from baton.security.roles import Role
from baton.security.tokens import read_tokens
from baton.settings.gateway_config import GatewaySettings
from baton.settings.node_config import DecodeSettings, PrefillSettings
from baton.settings.reader import describe_validation_error, read_settings, wrong_variables
from tests.fuzz import mutate
from tests.fuzz.folders import in_folders
from tests.fuzz.target import Case, Targets

_CLASSES = (PrefillSettings, DecodeSettings, GatewaySettings)
_NUMBERS = (
    "",
    "0",
    "-0",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "1e-999",
    "0x10",
    "1_000",
    "٣",
    "²",
    " 1 ",
    "1.5",
    "1.0",
    "+1",
)
_WHOLE = 0.01  # of inputs that go through flags and environment, which takes a thousand times as long
_SECRET = b"a-secret-of-more-than-thirty-two-letters"
_KEYS = (
    entry("alice", "key", operator=False) + "tokens_per_minute = 7\n" + entry("root", "other", operator=True),
    "[limits]\nconcurrent = 64\n\n[keys.bob]\nsha256 = [\n" + f'"{"0" * 64}", "{"1" * 64}"]\n',
)
_PUBLIC = tuple(
    key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for key in (ec.generate_private_key(ec.SECP256R1()).public_key(), ed25519.Ed25519PrivateKey.generate().public_key())
)
_KEY_SET = {
    "keys": [
        {"kty": "oct", "k": "YS1zZWNyZXQtb2YtbW9yZS10aGFuLXRoaXJ0eS10d28tbGV0dGVycw", "kid": "a", "alg": "HS256"},
        {"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo", "kid": "b", "use": "sig"},
        {"kty": "EC", "crv": "P-256", "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU", "kid": "c",
         "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"},
        {"kty": "RSA", "n": "0vx7agoebGcQSuuPiLJXZptN9nndrQmbXEps2aiAFbWhM78LhWx4cbbfAAtVT86zwu1RK7a", "e": "AQAB"},
    ]
}  # fmt: skip
_CLAIMS = {"sub": "alice", "exp": 4e9, "aud": "baton", "iss": "me", "scope": "a baton:operator", "nbf": 0, "iat": 1}


def make_settings(random: Random) -> Case:
    """The class's number, how the settings are given, and their names and values as JSON."""
    number = random.randrange(len(_CLASSES))
    how = random.choice(("flags", "variables")) if random.random() < _WHOLE else "values"
    names = random.sample(sorted(_CLASSES[number].model_fields), random.choice((1, 1, 2, 3)))
    values = {name: _value(random) for name in names}
    if random.random() < 0.02:
        values[mutate.text(random, "block_size")] = "1"
    return bytes([number]), how.encode(), json.dumps(values).encode()


def _value(random: Random) -> str:
    match random.randrange(4):
        case 0:
            return str(mutate.number(random))
        case 1:
            return random.choice(_NUMBERS)
        case _:
            return mutate.text(random, random.choice(("auto", "127.0.0.1:1", "true", "elastic", "float32", "1.5")))


def settings(folder: Path, case: Case) -> None:
    del folder
    cls = _CLASSES[sum(case[0]) % len(_CLASSES)]
    try:
        given = {str(name): str(value) for name, value in json.loads(case[2]).items()}
    except (ValueError, AttributeError, RecursionError):
        return
    wrong_variables({variable(name): value for name, value in given.items()})
    clean = {name.replace("\0", "").replace("=", ""): value.replace("\0", "") for name, value in given.items()}
    if case[1] == b"values":
        _validate(cls, {name: value for name, value in clean.items() if name in cls.model_fields})
    elif case[1] == b"flags":
        _read(cls, [f"{flag(name)}={value}" for name, value in clean.items()], {})
    else:
        _read(cls, [], {_encodable(variable(name)): _encodable(value) for name, value in clean.items()})


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


def _validate(cls: Any, given: dict[str, str]) -> None:
    try:
        cls.__pydantic_validator__.validate_python(given, self_instance=cls.__new__(cls))
    except ValidationError as error:
        lines = describe_validation_error(cls, error)
        assert all(len(line) < 1000 and line.isprintable() for line in lines), lines
        raise ConfigError(lines[0]) from None


def _read(cls: Any, flags: list[str], variables: dict[str, str]) -> None:
    error = io.StringIO()
    with patch.dict("os.environ", variables), contextlib.redirect_stderr(error), contextlib.redirect_stdout(error):
        try:
            read_settings(cls, "node", flags)
        except SystemExit as ended:
            lines = error.getvalue()
            if ended.code not in (0, 2) or not lines or len(lines) > 50_000 or "Traceback" in lines:
                raise InternalError(f"exit code {ended.code}: {lines[:500]}") from None
            raise ConfigError(f"a setting is wrong: {lines.strip().splitlines()[-1]}") from None


def make_keys(random: Random) -> Case:
    return (mutate.data(random, random.choice(_KEYS).encode()),)


def keys(folder: Path, case: Case) -> None:
    path = folder / "keys.toml"
    path.write_bytes(case[0])
    found = read_keys(path)
    found.owner("key")


def make_tokens(random: Random) -> Case:
    """The file that checks tokens, and a token."""
    which = random.randrange(4)
    if which == 0:
        file = mutate.any_data(random, json.dumps(_KEY_SET).encode())
    elif which == 1:
        file = mutate.data(random, random.choice(_PUBLIC))
    else:
        file = mutate.data(random, _SECRET) if random.random() < 0.2 else _SECRET
    claims = mutate.json_value(random, _CLAIMS) if random.random() < 0.8 else _CLAIMS
    try:
        token = jwt.api_jws.encode(json.dumps(claims).encode(), _SECRET, headers=_headers(random)).encode()
    except Exception:  # noqa: BLE001  the library makes no token with such headers
        token = b"a.b.c"
    return file, mutate.data(random, token) if random.random() < 0.3 else token


def _headers(random: Random) -> dict[str, Any] | None:
    if random.random() < 0.6:
        return None
    changed = mutate.json_value(random, {"kid": "a", "typ": "JWT", "crit": ["x"], "b64": True})
    return changed if isinstance(changed, dict) else None


def tokens(folder: Path, case: Case) -> None:
    path = folder / "jwt"
    path.write_bytes(case[0])
    token = case[1].decode("latin-1")
    for audience in (None, "baton"):
        read_tokens(path, audience=audience, issuer=None).subject(token)


_AUTHORITY = Authority.new(days=365)
_PAIR = _AUTHORITY.for_role(Role.GATEWAY, lifetime=timedelta(days=365))
_PEM_LINE = re.compile(rb"-----BEGIN ([A-Z ]+)-----\n(.*?)-----END", re.DOTALL)


def make_certificates(random: Random) -> Case:
    """A certificate, its key and the CA; one of them changed as PEM, or inside it."""
    parts = [_PAIR.cert, _PAIR.key, _AUTHORITY.pair.cert]
    place = random.choice((0, 0, 1, 2))
    found = _PEM_LINE.search(parts[place])
    if found is not None and random.random() < 0.7:
        inside = base64.encodebytes(_changed_bytes(random, base64.b64decode(found[2])))
        parts[place] = b"-----BEGIN %b-----\n%b-----END %b-----\n" % (found[1], inside, found[1])
    else:
        parts[place] = mutate.data(random, parts[place])
    return tuple(parts)


def _changed_bytes(random: Random, data: bytes) -> bytes:
    """Some bytes changed, none added: what encloses them stays readable."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        changed[random.randrange(len(changed))] = random.randrange(256)
    return bytes(changed)


def certificates(folder: Path, case: Case) -> None:
    paths = [folder / name for name in ("cert", "key", "ca")]
    for path, data in zip(paths, case, strict=True):
        path.write_bytes(data)
    read_pems(Files(paths[0], paths[1], paths[2]), role=Role.GATEWAY)


@contextmanager
def setting_targets() -> Iterator[Targets]:
    made = (
        (make_settings, settings),
        (make_keys, keys),
        (make_tokens, tokens),
        (make_certificates, certificates),
    )
    with in_folders(made) as targets:
        yield targets
