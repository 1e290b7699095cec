"""Flags of commands that call a gateway: the API key, and the CA of the gateway's certificate."""

from pathlib import Path
from typing import Annotated

import typer

from baton.core.errors import InvalidRequest
from baton.settings.environment import set_client_access

ApiKey = Annotated[
    str | None,
    typer.Option(
        help="API key, or @FILE to read it from a file, so that it does not show in process lists. Default: "
        "BATON_API_KEY."
    ),
]
ClientCa = Annotated[
    str | None,
    typer.Option(
        "--client-ca",
        help='PEM file with the CA of the gateway\'s certificate, or "system". Default: BATON_CLIENT_CA.',
    ),
]


def use(api_key: str | None, client_ca: str | None) -> None:
    """Sets the key and CA with which this process and its children call gateways.
    Raises:
        InvalidRequest: the key's file cannot be read.
    """
    set_client_access(api_key=None if api_key is None else read_key(api_key), tls_ca=client_ca)


def read_key(given: str) -> str:
    """Returns the key; of @FILE, the file's content.
    Raises:
        InvalidRequest: the file cannot be read.
    """
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the key cannot be read: {error}", field="api_key") from None
