"""`baton certs` makes certificates for a laptop; `baton key` makes an API key and adds it to the gateway's file."""

import socket
from pathlib import Path
from typing import Annotated

import typer

from baton.core.errors import ConfigError
from baton.core.regular_file import check_can_write, read_regular_file, write_regular_file
from baton.security.keys import entry, new_key, parse_keys
from baton.security.watched import FILE_BYTES_MAX


def certs(
    folder: Annotated[Path, typer.Argument(help="Folder for the files; created if missing.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Host name or address at which clients reach a gateway; may be repeated."),
    ] = None,
    days: Annotated[float, typer.Option(min=0.001, max=36_500, help="Days that the certificates are valid.")] = 90,
) -> None:
    """Make a CA and a certificate for each role.

    Also makes the certificate that gateways show to clients. Keeps a CA that the folder already has.
    """
    # This import takes a tenth of a second, so only this command pays for it.
    from baton.security.certificates import write_set

    hosts = dict.fromkeys(["localhost", "127.0.0.1", "::1", socket.gethostname(), *(host or ())])
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_set(folder, hosts=list(hosts), days=days)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}", field="folder", value=folder) from None
    print(f"wrote certificates to {folder}; keep ca.key and the other .key files secret")


def key(
    name: Annotated[str, typer.Argument(help="Owner of the key, for logs and limits.")],
    file: Annotated[Path, typer.Option(help="File of API keys (the gateway's BATON_API_KEYS); created if missing.")],
    operator: Annotated[
        bool, typer.Option("--operator", help="Allow operators' commands too, such as status, top and role.")
    ] = False,
) -> None:
    """Make an API key, print it, and add its hash to a file.

    The key itself is stored nowhere, so save it now.
    """
    made = new_key()
    lines = entry(name, made, operator=operator)
    before = ""
    try:
        check_can_write(file)
        before = _content(file)
        after = before + ("\n" if before else "") + lines
        parse_keys(after.encode(), file)
        write_regular_file(file, after)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot write {file}: {why}", field="file", value=file) from None
    except ConfigError:
        if f'[keys."{name}"]' in before:
            cure = "choose another name, or edit the file"
            raise ConfigError(f"{file} already has a key of {name}", field="name", value=name, cure=cure) from None
        raise
    print(made)


def _content(file: Path) -> str:
    """Returns the file's text, or "" if the file does not exist yet."""
    try:
        return read_regular_file(file, bytes_max=FILE_BYTES_MAX).decode()
    except FileNotFoundError:
        return ""
