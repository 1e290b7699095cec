"""Answers that are kept for a moment: many viewers cost no more than one. Pure but for the clock."""

import time

_KEPT_S = 1.0
_CLIENTS_MAX = 100


class Answers:
    """The last answer for each client; None: for whoever sees everything."""

    def __init__(self) -> None:
        self._kept: dict[str | None, tuple[float, bytes]] = {}

    def get(self, client: str | None) -> bytes | None:
        at_s, body = self._kept.get(client, (0.0, b""))
        return body if time.monotonic() - at_s < _KEPT_S else None

    def keep(self, client: str | None, body: bytes) -> bytes:
        self._kept.pop(client, None)
        self._kept[client] = time.monotonic(), body
        if len(self._kept) > _CLIENTS_MAX:
            del self._kept[next(iter(self._kept))]
        return body
