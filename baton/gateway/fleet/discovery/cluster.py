"""Reads and watches the EndpointSlices of Services with the Kubernetes project's client.

A pod uses its service account, which needs `list` and `watch` on endpointslices; outside a pod, KUBECONFIG locates the
cluster. The client is an optional package that takes 45 MiB, so it is imported at the first use.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson

from baton.core.errors import ConfigError
from baton.gateway.fleet.discovery.endpoint_slices import EndpointSlices
from baton.gateway.fleet.discovery.sources import ServicePort

log = logging.getLogger("baton")

# A watch ends after this time and continues in a new call, so a silently broken connection is unnoticed for no longer.
_WATCH_S = 120
_ANSWER_S = 15.0
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.5, 30.0
_LINE_BYTES_MAX = 64 << 20
_LABEL = "kubernetes.io/service-name"
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

_GONE = 410
_CURES = {
    401: "the token is no longer valid",
    403: "the service account may not list and watch endpointslices: see deploy/kustomize/components/endpoint-slices",
}


class _Ended(Exception):
    """The API server ended or refused a list or a watch.

    Attributes:
        code: status code of the HTTP response or of the Status object.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class ServiceWatch:
    """The addresses of one port of one Service, kept up to date while `run` runs, between `connect` and `close`.

    Args:
        on_change: called when the addresses have changed.
    """

    def __init__(self, place: ServicePort, on_change: Callable[[], None]) -> None:
        self._place = place
        self._on_change = on_change
        self._slices = EndpointSlices(place.port)
        self._addresses: frozenset[str] = frozenset()
        self._last_error = ""
        self._api: Any = None
        self._namespace = place.namespace

    @property
    def addresses(self) -> frozenset[str]:
        """The last known addresses; they stay while the API server is unreachable."""
        return self._addresses

    async def connect(self) -> None:
        """Creates the API client without sending a request.

        Raises:
            ConfigError: the client package is not installed, or no cluster is configured.
        """
        self._api, self._namespace = await _connect(self._place)

    async def close(self) -> None:
        if self._api is not None:
            await self._api.api_client.close()

    async def run(self) -> None:
        """Follows the slices until it is cancelled."""
        pause_s = _PAUSE_S_MIN
        while True:
            try:
                version = await self._list()
                self._report_error("")
                while True:
                    version = await self._watch(version)
                    pause_s = _PAUSE_S_MIN
            except Exception as error:  # noqa: BLE001 (the addresses stay, whichever error the client raises)
                gone = isinstance(error, _Ended) and error.code == _GONE
                if not gone:  # else the version is too old to continue from, and the next list returns a new one
                    self._report_error(_explain(error))
            await asyncio.sleep(pause_s * (1 + random.random()) / 2)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    async def _list(self) -> str:
        """Reads all slices; returns the version from which `_watch` continues."""
        response = await self._ask(_ANSWER_S)
        try:
            listed = orjson.loads(await response.read())
        finally:
            response.release()
        self._slices.replace(listed.get("items") or ())
        self._changed()
        return str(listed["metadata"]["resourceVersion"])

    async def _watch(self, version: str) -> str:
        """Follows changes until the server ends the watch; returns the version from which the next one continues."""
        response = await self._ask(
            _WATCH_S + _ANSWER_S,
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=_WATCH_S,
        )
        try:
            async for line in _lines(response.content.iter_any()):
                event = orjson.loads(line)
                what = event["object"]
                if event["type"] == "ERROR":
                    raise _Ended(int(what.get("code") or 0), str(what.get("message")))
                version = str(what["metadata"]["resourceVersion"])
                self._slices.apply(event["type"], what)
                self._changed()
        finally:
            response.close()
        return version

    async def _ask(self, timeout_s: float, **query: object) -> Any:
        response = await self._api.list_namespaced_endpoint_slice_without_preload_content(
            self._namespace,
            label_selector=f"{_LABEL}={self._place.service}",
            _request_timeout=timeout_s,
            **query,
        )
        if response.status != 200:
            text = await response.text()
            response.release()
            raise _Ended(response.status, f"HTTP {response.status}: {text[:200]}")
        return response

    def _changed(self) -> None:
        addresses = self._slices.addresses()
        if addresses != self._addresses:
            self._addresses = addresses
            self._on_change()

    def _report_error(self, text: str) -> None:
        """Logs an error when it changes, and once when it is over (`text` is empty)."""
        if text and text != self._last_error:
            log.warning("%s: %s; its last %d addresses stay", self._place, text, len(self._addresses))
        elif self._last_error and not text:
            log.info("%s: readable again", self._place)
        self._last_error = text


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields complete lines. A slice of 1,000 endpoints is a line of several hundred KB."""
    rest = bytearray()
    async for chunk in chunks:
        rest += chunk
        if b"\n" not in chunk:
            if len(rest) > _LINE_BYTES_MAX:
                raise ValueError(f"an event has more than {_LINE_BYTES_MAX >> 20} MiB")
            continue
        *complete, last = bytes(rest).split(b"\n")
        rest = bytearray(last)
        for line in complete:
            if line.strip():
                yield line


def _explain(error: Exception) -> str:
    code = getattr(error, "code", None) or getattr(error, "status", None)
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return f"{_CURES[code]} ({text})" if code in _CURES else text


def _own_namespace() -> str:
    return _OWN_NAMESPACE.read_text().strip()


async def _connect(place: ServicePort) -> tuple[Any, str]:
    """Returns a client of the API group and the Service's namespace.

    Raises:
        ConfigError: the client package is not installed, or no cluster is configured.
    """
    try:
        from kubernetes.aio import client, config
    except ImportError:
        cure = "pip install 'baton-serving[kubernetes]'"
        raise ConfigError(f"{place} needs the package kubernetes", value=str(place), cure=cure) from None
    configuration = client.Configuration()
    namespace = ""
    try:
        await config.load_kube_config(client_configuration=configuration, persist_config=False)
        if not place.namespace:
            _, current = config.list_kube_config_contexts()
            namespace = (current.get("context") or {}).get("namespace") or "default"
    except (config.ConfigException, OSError, ValueError) as outside:
        try:
            config.load_incluster_config(client_configuration=configuration)
            namespace = _own_namespace()
        except (config.ConfigException, OSError) as inside:
            cure = "set KUBECONFIG, or give the pod a service account whose token is mounted"
            message = f"{place}: no cluster is configured: {_explain(outside)}; in a pod: {_explain(inside)}"
            raise ConfigError(message, value=str(place), cure=cure) from None
    return client.DiscoveryV1Api(client.ApiClient(configuration)), place.namespace or namespace
