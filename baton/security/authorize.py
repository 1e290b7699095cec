"""Decides who may call what, by one table with a row for each RPC of each service. An RPC without a row is refused."""

from collections.abc import Mapping, Set
from enum import StrEnum

from baton.core.errors import PermissionDenied


class Right(StrEnum):
    """A right that a caller's certificate or key grants. Every caller has `ANYONE`."""

    ANYONE = "anyone"
    CLIENT = "client"
    GATEWAY = "gateway"
    PREFILL = "prefill"
    DECODE = "decode"
    OPERATOR = "operator"


ALL_RIGHTS = frozenset(Right)

_ANYONE = frozenset({Right.ANYONE})
_CLIENT = frozenset({Right.CLIENT, Right.OPERATOR})
_OPERATOR = frozenset({Right.OPERATOR})
_GATEWAY = frozenset({Right.GATEWAY})
_PREFILL = frozenset({Right.PREFILL})
_NODES = frozenset({Right.PREFILL, Right.DECODE})
_WATCHING = frozenset({Right.GATEWAY, Right.OPERATOR})

TABLE: Mapping[str, Mapping[str, frozenset[Right]]] = {
    # Served by nodes.
    "baton.internal.v1.Decode": {"Session": _GATEWAY, "Pair": _PREFILL},
    "baton.internal.v1.Prefill": {"Prefill": _GATEWAY, "Connect": _GATEWAY, "Pool": _GATEWAY},
    "baton.internal.v1.Node": {
        "Describe": _WATCHING,
        "Watch": _WATCHING,
        "WatchCache": _WATCHING,  # reveals prompts
        "Drain": _OPERATOR,
        "SwitchRole": _WATCHING,
        "LoadAdapter": _OPERATOR,  # reads a directory that the caller names
        "UnloadAdapter": _OPERATOR,
        "GetExpertLoad": _OPERATOR,
        "Pull": _NODES,
        "DropKv": _WATCHING,
    },
    # Served by gateways.
    "baton.v1.Generation": {
        "Generate": _CLIENT,
        "Complete": _CLIENT,
        "Abort": _CLIENT,
        "Tokenize": _CLIENT,
        "Detokenize": _CLIENT,
        "ListModels": _CLIENT,
        "GetModelInfo": _CLIENT,
        "GetTokenizer": _CLIENT,
    },
    "baton.v1.Operations": {
        "GetLoads": _OPERATOR,
        "ClusterStatus": _OPERATOR,
        "ClusterView": _OPERATOR,
        "SwitchNodeRole": _OPERATOR,
        "DropKv": _OPERATOR,
    },
    "vllm.grpc.engine.VllmEngine": {
        "Generate": _CLIENT,
        "Embed": _CLIENT,
        "HealthCheck": _CLIENT,
        "Abort": _CLIENT,
        "GetModelInfo": _CLIENT,
        "GetServerInfo": _CLIENT,
        "GetTokenizer": _CLIENT,
        "FlushCache": _OPERATOR,
        "StartProfile": _OPERATOR,
        "StopProfile": _OPERATOR,
        "GetLoads": _OPERATOR,
        "SubscribeKvEvents": _OPERATOR,  # reveals prompts
    },
    "inference.GRPCInferenceService": {
        "ServerLive": _ANYONE,
        "ServerReady": _ANYONE,
        "ModelReady": _ANYONE,
        "ServerMetadata": _CLIENT,
        "ModelMetadata": _CLIENT,
        "ModelInfer": _CLIENT,
        "ModelStreamInfer": _CLIENT,
        "RepositoryModelLoad": _OPERATOR,
        "RepositoryModelUnload": _OPERATOR,
    },
    # Served by the endpoint picker to a proxy, which shows no certificate.
    "envoy.service.ext_proc.v3.ExternalProcessor": {"Process": _ANYONE},
    # Served by every process.
    "grpc.health.v1.Health": {"Check": _ANYONE, "List": _ANYONE, "Watch": _ANYONE},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": _OPERATOR},
    "grpc.reflection.v1.ServerReflection": {"ServerReflectionInfo": _OPERATOR},
}

_NOBODY: frozenset[Right] = frozenset()

# Files of the page /ui. They contain no data; the page fetches /ui/state, which checks its caller.
UI_FILES = frozenset(
    f"/ui/{name}"
    for name in (
        "page.css",
        "page.js",
        "dom.js",
        "nodes.js",
        "links.js",
        "charts.js",
        "requests.js",
        "prompt.js",
        "icon.svg",
    )
)

# Paths of the gateway's HTTP server that need no key. All others need a client's key, even paths that do not exist.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/docs", "/openapi.json", "/ui", *UI_FILES})
OPERATOR_PATHS = frozenset({"/metrics"})


def rights_for(method: str) -> frozenset[Right]:
    """Returns the rights that allow `/package.Service/Method`. One suffices; a method without a row has none."""
    service, _, name = method.removeprefix("/").rpartition("/")
    return TABLE.get(service, {}).get(name, _NOBODY)


def rights_for_path(path: str) -> frozenset[Right]:
    """Returns the rights that allow an HTTP path. One suffices."""
    if path in OPEN_PATHS:
        return _ANYONE
    return _OPERATOR if path in OPERATOR_PATHS else _CLIENT


def check(what: str, needed: Set[Right], held: Set[Right]) -> None:
    """Checks that a caller holds one of the needed rights.

    Args:
        what: the method or path, for the error.

    Raises:
        PermissionDenied: the caller holds none of them.
    """
    if not needed & held:
        mine = ", ".join(sorted(held - {Right.ANYONE})) or "nobody"
        allowed = tuple(sorted(needed)) or ("nobody",)
        cure = "use a certificate or key of one of these; `baton key NAME --operator` makes an operator's key"
        raise PermissionDenied(
            f"{what} is not allowed for {mine}", field="caller", value=mine, allowed=allowed, cure=cure
        )
