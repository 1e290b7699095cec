"""The TLS context of an HTTP server. Changed files take effect at the next handshake."""

import os
import ssl

from baton.security.pem import Pems
from baton.security.watched import Watched


def http_context(pems: Watched[Pems]) -> ssl.SSLContext:
    """Returns a server context for TLS 1.2 and 1.3 that uses the current value of `pems` at each handshake."""
    used = pems.get()
    current = first = _context(used)

    def renew(connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context_of: ssl.SSLContext) -> None:
        """Switches to changed files. OpenSSL calls this at each handshake, even if the client names no host."""
        nonlocal used, current
        found = pems.get()
        if found is not used:
            used, current = found, _context(found)
        connection.context = current

    first.sni_callback = renew
    return first


def _context(pems: Pems) -> ssl.SSLContext:
    assert pems.cert is not None
    assert pems.key is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    # OpenSSL loads a chain only from a file. One in memory needs no room on a disk, and nobody else can open it.
    pair = os.memfd_create("tls-pair")
    try:
        with os.fdopen(os.dup(pair), "wb") as opened:
            opened.write(pems.key + b"\n" + pems.cert)
        context.load_cert_chain(f"/proc/self/fd/{pair}")
    finally:
        os.close(pair)
    return context
