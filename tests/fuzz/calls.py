"""Calls any method with any bytes. A call must end with success, or with a status that has our detail."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from baton.core.errors import BatonError, InternalError, InvalidRequest
from baton.rpc.status import from_rpc_error

_RESPONSES_MAX = 20
_TIMEOUT_S = 300.0  # wall time, so long that only what hangs takes it
_WROTE_TOO_LATE = "Internal error from Core"  # the client's own status of a call that ended before all was written
_SILENCE_S = 0.02  # of streams that never end by themselves


@dataclass(frozen=True)
class Method:
    path: str
    request: type[Message]
    streams_requests: bool
    streams_responses: bool


def methods_of(services: Sequence[str]) -> list[Method]:
    pool = descriptor_pool.Default()
    found = [pool.FindServiceByName(name) for name in services]
    return [
        Method(
            f"/{service.full_name}/{method.name}",
            GetMessageClass(method.input_type),
            method.client_streaming,
            method.server_streaming,
        )
        for service in found
        for method in service.methods
    ]


def method_of(known: Sequence[Method], path: bytes) -> Method:
    """The method with this path; of paths that were changed, any."""
    found = [method for method in known if method.path.encode() == path]
    return found[0] if found else known[sum(path) % len(known)]


async def ask(channel: grpc.aio.Channel, method: Method, requests: Sequence[bytes]) -> str | None:
    """Sends these messages, and reads the answers until the call ends or is silent.

    Returns "silent" or None.

    Raises:
        BatonError: what the server answered.
        AssertionError: it answered with a status that is none of ours.
    """
    kind = f"{'stream' if method.streams_requests else 'unary'}_{'stream' if method.streams_responses else 'unary'}"
    make = getattr(channel, kind)(method.path)
    if method.streams_requests:
        call = make(timeout=_TIMEOUT_S)
    else:
        call = make(requests[0] if requests else b"", timeout=_TIMEOUT_S)
    try:
        if method.streams_requests:
            for request in requests:
                await call.write(request)
            await call.done_writing()
        if not method.streams_responses:
            await call
        else:
            for _ in range(_RESPONSES_MAX):
                async with asyncio.timeout(_SILENCE_S if _is_endless(method) else None):
                    if await call.read() is grpc.aio.EOF:
                        break
    except TimeoutError:
        return "silent"
    except asyncio.InvalidStateError:
        pass  # the call ended before all was written: its status decides
    except grpc.aio.AioRpcError as error:
        if error.details() != _WROTE_TOO_LATE:
            raise _ours(method, error) from None
    finally:
        call.cancel()
    return None


def _is_endless(method: Method) -> bool:
    return method.path.rpartition("/")[2] in ("Watch", "WatchCache", "SubscribeKvEvents")


def _ours(method: Method, error: grpc.aio.AioRpcError) -> BatonError:
    keys = [key for key, _ in error.trailing_metadata() or ()]
    typed = from_rpc_error(error)
    if error.code() is grpc.StatusCode.UNIMPLEMENTED or "Health" in method.path:
        return InvalidRequest(str(error.details()))
    assert "grpc-status-details-bin" in keys, f"{method.path}: {error.code()} {error.details()}"
    assert error.code() is not grpc.StatusCode.UNKNOWN, f"{method.path}: {error.details()}"
    assert not isinstance(typed, InternalError), f"{method.path}: {typed}"
    return typed
