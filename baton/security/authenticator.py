"""Finds the client that an API key or token belongs to, for every call of the gateway's gRPC and HTTP servers."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from baton.core.errors import Unauthenticated
from baton.security.authorize import Right
from baton.security.exposure import is_loopback
from baton.security.identity import Caller
from baton.security.keys import KeyFile, Owner, read_keys
from baton.security.limit_table import LimitTable
from baton.security.limits import Budget, Limits
from baton.security.watched import Watched

if TYPE_CHECKING:
    from baton.security.tokens import Tokens

_CLIENT = frozenset({Right.ANYONE, Right.CLIENT})
_OPERATOR = frozenset({Right.ANYONE, Right.CLIENT, Right.OPERATOR})
_BUDGETS_MAX = 10_000
_CURE = "send `authorization: Bearer KEY`; for `baton` and its client set BATON_API_KEY"


class AuthenticatorSettings(Protocol):
    """The gateway's settings about clients' credentials."""

    @property
    def api_keys(self) -> Path | None: ...
    @property
    def jwt_keys(self) -> Path | None: ...
    @property
    def jwt_audience(self) -> str | None: ...
    @property
    def jwt_issuer(self) -> str | None: ...
    @property
    def insecure(self) -> bool: ...


class Authenticator:
    """Finds the client that a credential belongs to.

    Args:
        limit_table: where all processes of the gateway count what clients use; None: there is only this process.

    Raises:
        ConfigError: a file of the settings cannot be used.
    """

    def __init__(self, settings: AuthenticatorSettings, limit_table: LimitTable | None = None) -> None:
        self._limit_table = limit_table
        self._insecure = settings.insecure
        self._keys: Watched[KeyFile] | None = None
        self._tokens: Watched[Tokens] | None = None
        self._budgets: dict[str, Budget] = {}
        if (path := settings.api_keys) is not None:
            self._keys = Watched([path], lambda: read_keys(path))
        if settings.jwt_keys is not None:
            self._tokens = _watch_tokens(settings.jwt_keys, settings.jwt_audience, settings.jwt_issuer)

    @property
    def locked(self) -> bool:
        """Whether callers need a key or a token."""
        return self._keys is not None or self._tokens is not None

    def caller(self, credential: str | None, host: str) -> Caller:
        """Returns the caller that sends this credential from this host.

        Raises:
            Unauthenticated: the credential is not valid, or one is required and missing. The error never contains it.
        """
        if not self.locked:
            trusted = self._insecure or is_loopback(host) or host == "unix"
            return Caller(host, _OPERATOR if trusted else _CLIENT)
        if not credential:
            raise Unauthenticated("this gateway requires an API key", field="authorization", cure=_CURE)
        if self._tokens is not None and credential.count(".") == 2:
            subject = self._tokens.get().subject(credential)
            limits = Limits() if self._keys is None else self._keys.get().default_limits
            return self._identified(subject.name, limits, operator=subject.operator)
        owner = self._owner(credential)
        if owner is None:
            raise Unauthenticated("the API key is not valid", field="authorization", cure=_CURE)
        return self._identified(owner.name, owner.limits, operator=owner.operator)

    def _owner(self, credential: str) -> Owner | None:
        return None if self._keys is None else self._keys.get().owner(credential)

    def _identified(self, name: str, limits: Limits, *, operator: bool) -> Caller:
        return Caller(name, _OPERATOR if operator else _CLIENT, proved=True, budget=self._budget(name, limits))

    def _budget(self, name: str, limits: Limits) -> Budget:
        known = self._budgets.pop(name, None)
        if known is None or known.limits != limits:
            known = Budget(limits, name, table=self._limit_table)
        self._budgets[name] = known
        if len(self._budgets) > _BUDGETS_MAX:
            # Drops the budget that was unused the longest; its owner starts with a full one.
            del self._budgets[next(iter(self._budgets))]
        return known


def bearer(authorization: str | None) -> str | None:
    """Returns the credential of an `authorization` header; None if it has no bearer credential."""
    scheme, _, credential = (authorization or "").strip().partition(" ")
    return credential.strip() or None if scheme.lower() == "bearer" else None


def _watch_tokens(path: Path, audience: str | None, issuer: str | None) -> "Watched[Tokens]":
    # Importing the signature libraries takes half a second, so only gateways with tokens do it.
    from baton.security.tokens import read_tokens

    read: Callable[[], Tokens] = lambda: read_tokens(path, audience=audience, issuer=issuer)  # noqa: E731
    return Watched([path], read)
