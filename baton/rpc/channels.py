"""gRPC channels and the options that channels and servers share."""

from typing import Any

import grpc

from baton.core.limits import KEEPALIVE_S
from baton.core.proxies import Proxy
from baton.security.tls import Dial

MESSAGE_BYTES_MAX = 256 << 20
_GRPC_BYTES_MAX = (1 << 31) - 1
# With gRPC's default limit, random calls of a burst of over 1000 end as cancelled before they reach a service. Our
# services limit their requests themselves, with a typed error.
_PENDING_CALLS_MAX = 1 << 20
# A server's port accepts connections before the server answers: when it has just started, or on a busy machine.
ATTEMPT_S, SHORT_ATTEMPT_S = 20.0, 2.0
_HANDSHAKE_MS = 20_000  # by gRPC's default an unauthenticated peer keeps a silent connection for two minutes


def channel_options(
    *, keepalive_s: float = KEEPALIVE_S, shared: bool = False, receive_bytes_max: int = MESSAGE_BYTES_MAX
) -> list[tuple[str, int]]:
    """Options of servers and channels: large messages for long prompts, and pings that detect a silent peer.

    Args:
        shared: other servers may listen on the same port.
        receive_bytes_max: largest message; gRPC refuses a larger one without details.
    """
    return [
        ("grpc.so_reuseport", int(shared)),
        ("grpc.max_receive_message_length", min(receive_bytes_max, _GRPC_BYTES_MAX)),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.keepalive_time_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive_s * 1000)),
        # NOTE: while a ping for flow control is under way, gRPC sends none for keepalive, and by default it waits a
        # minute for the answer to that ping.
        ("grpc.http2.ping_timeout_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        # NOTE: late pings on a busy machine arrive together, and gRPC would close the connection because of that.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server.max_pending_requests", _PENDING_CALLS_MAX),
        ("grpc.server.max_pending_requests_hard_limit", _PENDING_CALLS_MAX),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
    ]


def connect(
    address: str,
    *,
    keepalive_s: float = KEEPALIVE_S,
    dial: Dial | None = None,
    proxy: Proxy | None = None,
    attempt_s: float = ATTEMPT_S,
) -> grpc.aio.Channel:
    """A channel with our options. It reconnects fast, because nodes restart.

    Args:
        attempt_s: time limit of one attempt to connect; calls fail when it is over. `SHORT_ATTEMPT_S` where another
            address can be tried.
        dial: the channel's credentials; None: without TLS.
        proxy: None connects directly, whatever the environment says, as between processes of the cluster.
    """
    options: list[tuple[str, Any]] = [
        *channel_options(keepalive_s=keepalive_s),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", int(attempt_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_retries", 0),
        # NOTE: with the global pool, a new incarnation at a known address would inherit a dead connection.
        ("grpc.use_local_subchannel_pool", 1),
        *proxy_options(proxy),
    ]
    if dial is not None:
        return dial.channel(address, options)
    return grpc.aio.insecure_channel(address, options=options)


def proxy_options(proxy: Proxy | None) -> list[tuple[str, Any]]:
    """Options of a channel through this proxy, or through none. Without them gRPC follows the environment."""
    return [("grpc.enable_http_proxy", int(proxy is not None)), *([("grpc.http_proxy", proxy.url)] if proxy else [])]
