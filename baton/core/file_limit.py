"""Raises the number of files that this process may open. Connections are files, too."""

import logging
import resource

from baton.core.errors import ConfigError

_WANTED = 1 << 16
_LEAST = 128  # a process opens 40 before its first connection
_FEW = 4096

log = logging.getLogger("baton")


def raise_file_limit() -> None:
    """Raises the soft limit: every pair takes a dozen files, and UCX keeps the files of a peer lost in mid-message.

    Warns of a low one: at the limit the event loop closes new connections without an error or a log line.

    Raises:
        ConfigError: the hard limit is too low to start.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    limit = max(soft, _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard))
    if limit < _LEAST:
        cure = "raise the limit, as with `ulimit -n 65536`"
        allowed = (f"at least {_LEAST}",)
        raise ConfigError(
            f"this process may open {limit} files", field="ulimit", value=limit, allowed=allowed, cure=cure
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < _FEW:
        log.warning(
            "this process may open %d files: connections above that are closed without an answer; raise the hard "
            "limit, as with `ulimit -Hn 65536`",
            limit,
        )
