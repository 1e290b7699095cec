"""API keys: the file, the door, the limits; and signed tokens in their place."""

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm

from baton.core.errors import ConfigError, InvalidRequest, Overloaded, Unauthenticated
from baton.security.authenticator import Authenticator, bearer
from baton.security.authorize import Right
from baton.security.identity import Caller
from baton.security.keys import entry, new_key, read_keys
from baton.security.limits import Budget, Limits
from baton.security.tokens import read_tokens
from baton.security.watched import Watched
from tests.unit.security.settings import AuthenticatorSettings

HASH = "0" * 64


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def test_the_file_has_hashes_and_no_key(file: Path) -> None:
    alice, admin = new_key(), new_key()
    file.write_text(entry("alice", alice, operator=False) + entry("admin", admin, operator=True))
    assert alice not in file.read_text()
    keys = read_keys(file)
    found = [keys.owner(key) for key in (alice, admin, "guessed", "", "\ud800")]
    assert [owner and (owner.name, owner.operator) for owner in found] == [
        ("alice", False), ("admin", True), None, None, None,
    ]  # fmt: skip


def test_an_owner_may_have_two_keys_while_one_is_replaced(file: Path) -> None:
    old, new = new_key(), new_key()
    hashes = [entry("a", key, operator=False).split('"')[3] for key in (old, new)]
    file.write_text(f"[keys.a]\nsha256 = {json.dumps(hashes)}\n")
    assert read_keys(file).owner(old) == read_keys(file).owner(new) != None  # noqa: E711


def test_limits_are_the_owners_own_or_those_of_all(file: Path) -> None:
    file.write_text(
        f'[limits]\nconcurrent = 4\ntokens_per_minute = 10\n[keys.a]\nsha256 = "{HASH}"\ntokens_per_minute = 99\n'
    )
    (owner,) = read_keys(file).owners.values()
    assert owner.limits == Limits(None, 99, 4)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("keys =", "not TOML"),
        ("[key.a]", "a table 'key'"),
        ('[keys.a]\nsha256 = "abc"', "64 lower-case hexadecimal"),
        (f'[keys.a]\nsha256 = "{HASH}"\ntoken_per_minute = 3', "keys.a.token_per_minute; allowed: sha256"),
        (f'[keys.a]\nsha256 = "{HASH}"\nconcurrent = 0', "at least 1"),
        (f'[keys.a]\nsha256 = "{HASH}"\nconcurrent = true', "at least 1"),
        (f'[keys.a]\nsha256 = "{HASH}"\noperator = "no"', "not true or false"),
        (f'[keys."a\\nb"]\nsha256 = "{HASH}"', "cannot name the owner"),
        (f'[keys.a]\nsha256 = "{HASH}"\n[keys.b]\nsha256 = "{HASH}"', "the same key for a and b"),
        ("keys = 3", "keys, which is not a table"),
    ],
)
def test_a_mistake_in_the_file_is_named(file: Path, text: str, wrong: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=wrong):
        read_keys(file)


def test_a_broken_file_leaves_the_keys_as_they_were(file: Path) -> None:
    key = new_key()
    file.write_text(entry("a", key, operator=False))
    watched = Watched([file], lambda: read_keys(file), look_every_s=0)
    file.write_text("half a fi")
    assert watched.get().owner(key) is not None
    file.write_text("")
    assert watched.get().owner(key) is None
    file.unlink()
    assert watched.get().owner(key) is None


def test_without_keys_this_machine_and_those_that_insecure_lets_in_are_operators() -> None:
    for insecure, host, operator in ((False, "127.0.0.1", True), (False, "10.0.0.9", False), (True, "10.0.0.9", True)):
        caller = Authenticator(AuthenticatorSettings(insecure=insecure)).caller(None, host)
        assert (caller.name, Right.OPERATOR in caller.rights, Right.CLIENT in caller.rights) == (host, operator, True)
        assert caller.salt("as given") == "as given"


@pytest.mark.parametrize("credential", [None, "", "guessed", "a.b.c", "Bearer x"])
def test_with_keys_only_they_open(file: Path, credential: str | None) -> None:
    file.write_text(entry("a", new_key(), operator=False))
    with pytest.raises(Unauthenticated) as caught:
        Authenticator(AuthenticatorSettings(api_keys=file, insecure=True)).caller(credential, "127.0.0.1")
    assert not credential or credential not in str(caught.value)


def test_a_file_without_keys_lets_nobody_in(file: Path) -> None:
    file.write_text("")
    with pytest.raises(Unauthenticated):
        Authenticator(AuthenticatorSettings(api_keys=file)).caller(new_key(), "127.0.0.1")


def test_the_header_is_a_bearers() -> None:
    given = ["Bearer k", "bearer  k ", "Basic k", "Bearer", "Bearer ", "k", None]
    assert [bearer(each) for each in given] == ["k", "k", None, None, None, None, None]


def test_sessions_of_two_callers_never_meet() -> None:
    names = [("a", "b"), ("ab", ""), ("a", ""), ("", "ab"), ("a", "bc"), ("ab", "c")]
    sessions = [Caller(name, frozenset()).session(given) for name, given in names]
    assert sessions.count("") == 2  # of those that named none
    assert len(set(sessions)) == 5


def test_salts_of_two_callers_never_meet() -> None:
    salts = {
        Caller(name, frozenset(), proved=True).salt(given)
        for name, given in [("a", ""), ("a", "b"), ("ab", ""), ("", "ab"), ("1", ":ab"), ("jwt:a", "")]
    }
    assert len(salts) == 6
    assert Caller("a", frozenset(), proved=True).salt("b") == Caller("a", frozenset(), proved=True).salt("b")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_requests_per_minute_come_back_at_their_pace() -> None:
    clock = Clock()
    budget = Budget(Limits(requests_per_minute=6), "a", clock=clock)
    for _ in range(6):
        with budget.request():
            pass
    with pytest.raises(Overloaded, match="a is at its limit of 6 requests per minute") as caught, budget.request():
        pass
    assert caught.value.retry_after_s == pytest.approx(10)
    clock.now_s += 10
    with budget.request():
        pass
    clock.now_s += 3600
    for _ in range(6):
        with budget.request():
            pass
    with pytest.raises(Overloaded), budget.request():
        pass


def test_tokens_are_paid_afterwards_and_a_debt_must_be_worked_off() -> None:
    clock = Clock()
    budget = Budget(Limits(tokens_per_minute=60), clock=clock)
    with budget.request():
        budget.spend(90)
    with pytest.raises(Overloaded) as caught, budget.request():
        pass
    assert caught.value.retry_after_s == pytest.approx(31)
    clock.now_s += 31
    with budget.request():
        pass


def test_requests_at_once_count_also_when_they_fail() -> None:
    budget = Budget(Limits(concurrent=2))
    with budget.request(), budget.request():
        for _ in range(2):
            with pytest.raises(Overloaded), budget.request():
                pass
    with pytest.raises(ZeroDivisionError), budget.request():
        raise ZeroDivisionError
    with budget.request(), budget.request():
        pass


def test_every_output_counts_as_a_request() -> None:
    clock = Clock()
    budget = Budget(Limits(requests_per_minute=6, concurrent=5), "a", clock=clock)
    with budget.request(outputs=4):
        with pytest.raises(Overloaded, match="5 requests at once"), budget.request(outputs=2):
            pass
        with budget.request():
            pass
    with pytest.raises(Overloaded, match="6 requests per minute") as caught, budget.request(outputs=2):
        pass
    assert caught.value.retry_after_s == pytest.approx(10)
    with pytest.raises(InvalidRequest) as never, budget.request(outputs=6):
        pass
    assert (never.value.field, never.value.allowed) == ("n", ("1 to 5",))


def test_a_prompts_tokens_are_held_until_they_are_counted() -> None:
    """So that many large texts at once are not tokenized on one minute's tokens."""
    clock = Clock()
    budget = Budget(Limits(tokens_per_minute=60), clock=clock)
    with budget.request(tokens=40) as prompt:
        with pytest.raises(Overloaded) as caught, budget.request(tokens=40):
            pass
        assert caught.value.retry_after_s == pytest.approx(20)
        prompt.has(50)
    with budget.request(tokens=10), pytest.raises(Overloaded), budget.request(tokens=1):
        pass
    with budget.request(tokens=10):  # it failed before it was counted, so that nothing is charged
        pass


def test_a_prompt_larger_than_a_minutes_tokens_needs_a_whole_minute() -> None:
    clock = Clock()
    budget = Budget(Limits(tokens_per_minute=60), clock=clock)
    with budget.request(tokens=1000):
        pass
    with budget.request():
        budget.spend(1)
    with pytest.raises(Overloaded) as caught, budget.request(tokens=1000):
        pass
    assert caught.value.retry_after_s == pytest.approx(1)


def test_what_only_prepares_a_request_is_no_request_but_keeps_the_other_limits() -> None:
    budget = Budget(Limits(requests_per_minute=1, concurrent=1, tokens_per_minute=60), clock=Clock())
    for _ in range(3):
        with budget.request(is_new=False), pytest.raises(Overloaded), budget.request(is_new=False):
            pass
    with budget.request():
        budget.spend(60)
    with pytest.raises(Overloaded, match="tokens per minute"), budget.request(is_new=False):
        pass


def test_a_client_has_one_budget_for_all_its_calls_and_keys(file: Path) -> None:
    old, new = new_key(), new_key()
    hashes = [entry("a", key, operator=False).split('"')[3] for key in (old, new)]
    file.write_text(f"[keys.a]\nsha256 = {json.dumps(hashes)}\nconcurrent = 1\n")
    door = Authenticator(AuthenticatorSettings(api_keys=file))
    with door.caller(old, "h").budget.request(), pytest.raises(Overloaded), door.caller(new, "i").budget.request():
        pass


# ---- tokens

SECRET = b"s" * 32
RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())


def pem(key: Any) -> bytes:
    data: bytes = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return data


def claims(**more: object) -> dict[str, object]:
    return {"sub": "alice", "exp": int(time.time()) + 600, **more}


@pytest.mark.parametrize(
    ("content", "key", "algorithm"),
    [
        (SECRET, SECRET, "HS256"),
        (pem(RSA), RSA, "RS256"),
        (pem(EC), EC, "ES256"),
        (pem(found := ed25519.Ed25519PrivateKey.generate()), found, "EdDSA"),
    ],
)
def test_a_token_with_a_good_signature_names_its_subject(file: Path, content: bytes, key: Any, algorithm: str) -> None:
    file.write_bytes(content)
    door = Authenticator(AuthenticatorSettings(jwt_keys=file))
    caller = door.caller(jwt.encode(claims(), key, algorithm), "10.0.0.9")
    assert (caller.name, caller.proved, Right.OPERATOR in caller.rights) == ("jwt:alice", True, False)
    operator = door.caller(jwt.encode(claims(scope="other baton:operator"), key, algorithm), "10.0.0.9")
    assert Right.OPERATOR in operator.rights


def test_subjects_of_two_issuers_are_two_clients(file: Path) -> None:
    file.write_bytes(SECRET)
    door = Authenticator(AuthenticatorSettings(jwt_keys=file))
    given = [
        {},
        {"iss": "https://one.example"},
        {"iss": "https://other.example"},
        {"sub": "alice@https://one.example"},
        {"sub": "alice%40https://one.example"},
        {"sub": "alice@https", "iss": "//one.example"},
    ]
    callers = [door.caller(jwt.encode(claims(**more), SECRET, "HS256"), "h") for more in given]
    assert len({caller.name for caller in callers}) == len(given)
    assert len({caller.salt("") for caller in callers}) == len(given)
    assert len({id(caller.budget) for caller in callers}) == len(given)
    for wrong in ("", "a\nb", "x" * 300):
        with pytest.raises(Unauthenticated, match="issuer"):
            door.caller(jwt.encode(claims(iss=wrong), SECRET, "HS256"), "h")


def test_the_keys_of_a_set_are_chosen_by_their_id_and_used_for_their_algorithm_alone(file: Path) -> None:
    listed = {**json.loads(ECAlgorithm.to_jwk(EC.public_key())), "kid": "new", "alg": "ES256"}
    file.write_text(json.dumps({"keys": [listed]}))
    tokens = read_tokens(file, audience=None, issuer=None)
    assert tokens.subject(jwt.encode(claims(), EC, "ES256", headers={"kid": "new"})).name == "jwt:alice"
    with pytest.raises(Unauthenticated, match="unknown key"):
        tokens.subject(jwt.encode(claims(), EC, "ES256", headers={"kid": "old"}))


def forged_with(header: dict[str, str], body: dict[str, object], secret: bytes) -> str:
    """A token signed with HMAC, without the library's check that the secret is not a public key."""
    import base64
    import hashlib
    import hmac

    def part(data: bytes) -> bytes:
        return base64.urlsafe_b64encode(data).rstrip(b"=")

    signed = part(json.dumps(header).encode()) + b"." + part(json.dumps(body).encode())
    return (signed + b"." + part(hmac.new(secret, signed, hashlib.sha256).digest())).decode()


@pytest.mark.parametrize(
    "token",
    [
        forged_with({"alg": "HS256", "typ": "JWT"}, claims(), pem(RSA)),  # the public key as a secret
        jwt.encode(claims(), "", "none"),
        jwt.encode(claims(), rsa.generate_private_key(public_exponent=65537, key_size=2048), "RS256"),
        jwt.encode({"sub": "alice"}, RSA, "RS256"),  # for ever
        jwt.encode({"exp": int(time.time()) + 60}, RSA, "RS256"),
        jwt.encode(claims(exp=int(time.time()) - 60), RSA, "RS256"),
        jwt.encode(claims(nbf=int(time.time()) + 60), RSA, "RS256"),
        jwt.encode(claims(aud="another"), RSA, "RS256"),
        jwt.encode(claims(), RSA, "RS256"),  # for nobody
        jwt.encode(claims(aud="baton", iss="another"), RSA, "RS256"),
        jwt.encode(claims(aud="baton", iss="us", sub="a\nb"), RSA, "RS256"),
        "a.b.c",
        "..",
        "\ud800.\n.x",
    ],
    ids=itertools.count(),  # tokens have the time in them, and every worker needs the same names
)
def test_any_other_token_is_refused_and_not_repeated(file: Path, token: str) -> None:
    file.write_bytes(pem(RSA))
    door = Authenticator(AuthenticatorSettings(jwt_keys=file, jwt_audience="baton", jwt_issuer="us"))
    assert door.caller(jwt.encode(claims(aud="baton", iss="us"), RSA, "RS256"), "h").name == "jwt:alice@us"
    with pytest.raises(Unauthenticated) as caught:
        door.caller(token, "127.0.0.1")
    assert token not in str(caught.value)


@pytest.mark.parametrize("content", [b"short", b'{"keys": []}', b'{"keys": 3}', b"{", b"-----BEGIN PUBLIC KEY-----"])
def test_a_file_without_a_usable_key_is_a_wrong_setting(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="BATON_JWT_KEYS"):
        Authenticator(AuthenticatorSettings(jwt_keys=file))


def test_replaced_key_of_tokens_is_used(file: Path) -> None:
    file.write_bytes(SECRET)
    watched = Watched([file], lambda: read_tokens(file, audience=None, issuer=None), look_every_s=0)
    file.write_bytes(b"t" * 40)
    os.utime(file)
    assert watched.get().subject(jwt.encode(claims(), b"t" * 40, "HS256")).name == "jwt:alice"
    with pytest.raises(Unauthenticated):
        watched.get().subject(jwt.encode(claims(), SECRET, "HS256"))


@pytest.mark.parametrize(
    "page", [b"<html><body>404 Not Found: no such page here</body></html>", b"not found " * 8, b"\x30\x82" * 40]
)
def test_a_page_in_place_of_a_key_set_is_no_secret(tmp_path: Path, page: bytes) -> None:
    file = tmp_path / "keys"
    file.write_bytes(page)
    with pytest.raises(ConfigError, match="has no key set"):
        read_tokens(file, audience=None, issuer=None)
