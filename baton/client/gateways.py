"""The gateways of one client: their channels, the choice of one for the next call, and the meaning of failed calls."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TypeVar

import grpc

from baton.core.errors import BatonError, DeadlineExceeded, Draining, NoNode, Overloaded
from baton.protos.v1 import generation_pb2_grpc, operations_pb2_grpc
from baton.rpc.channels import ATTEMPT_S, SHORT_ATTEMPT_S, connect
from baton.rpc.status import from_rpc_error, last_cause
from baton.security.access import client_proxy, dial_gateway
from baton.security.tls import Dial

Answer = TypeVar("Answer")

# gRPC ends a call with these, and without our error details, when the server process is going away.
_BROKEN_STREAM = (grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
_REFUSALS = (Overloaded, NoNode, Draining)
_RETRY_S_MIN = 0.01  # keeps a retry time of 0 from becoming a busy loop
TIMEOUT_S_MAX = 1e9  # gRPC overflows on longer timeouts and ends the call at once
_RETRY_S = 60.0  # how long refusals are retried if the call has no deadline


class LostGateway(Exception):
    """A gateway is unreachable or accepts no requests; `error` is raised if no other gateway can help."""

    def __init__(self, error: BatonError) -> None:
        super().__init__(str(error))
        self.error = error


class Gateway:
    """One gateway's address and the channel to it, which belongs to the event loop that uses it first."""

    # At run time there is one class of stubs; these annotations know the one of asynchronous channels.
    _stub: "generation_pb2_grpc.GenerationAsyncStub"
    _operations: "operations_pb2_grpc.OperationsAsyncStub"

    def __init__(self, target: str, dial: Dial | None, *, attempt_s: float) -> None:
        self.target = target
        self.proxy = client_proxy(target)
        self._dial = dial
        self._attempt_s = attempt_s
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def stub(self) -> "generation_pb2_grpc.GenerationAsyncStub":
        self._open()
        return self._stub

    @property
    def operations(self) -> "operations_pb2_grpc.OperationsAsyncStub":
        self._open()
        return self._operations

    async def close(self) -> None:
        self._closed = True
        if self._channel is not None and self._loop is asyncio.get_running_loop():
            await self._channel.close()
        self._channel = None

    def _open(self) -> None:
        """Makes the channel, once.

        Raises:
            RuntimeError: the client is closed, or used in a second event loop.
        """
        loop = asyncio.get_running_loop()
        if self._closed:
            raise RuntimeError("the client is closed")
        if self._channel is None:
            self._channel = connect(self.target, dial=self._dial, proxy=self.proxy, attempt_s=self._attempt_s)
            self._loop = loop
            self._stub = generation_pb2_grpc.GenerationStub(self._channel)
            self._operations = operations_pb2_grpc.OperationsStub(self._channel)
        elif self._loop is not loop:
            cure = "make one in each loop, or use Client, which has a loop of its own"
            raise RuntimeError(f"this AsyncClient was used in another event loop; {cure}")


class Retries:
    """Decides whether a refused call is retried: after the wait that the refusal names, before the deadline.

    Args:
        deadline_s: on the monotonic clock; None: no deadline.
        retry_s: most seconds of retrying, from now on; None: until the deadline, or 60 s without one.
    """

    def __init__(self, deadline_s: float | None, retry_s: float | None) -> None:
        self.deadline_s = deadline_s
        now_s = monotonic()
        if retry_s is None:
            self._until_s = now_s + _RETRY_S if deadline_s is None else deadline_s
        else:
            self._until_s = now_s + retry_s if deadline_s is None else min(deadline_s, now_s + retry_s)

    def left_s(self) -> float | None:
        """Returns the seconds until the deadline; None if there is no deadline."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - monotonic())

    async def wait(self, refusal: BatonError) -> bool:
        """Returns True when the request is to be sent again; False at once if waiting does not help, or not in time.

        NOTE: it raises nothing. A frame that still has the error that it raised would keep the call, and with it the
        connection, until Python looks for cycles.
        """
        if not isinstance(refusal, _REFUSALS) or refusal.retry_after_s is None:
            return False
        wait_s = max(_RETRY_S_MIN, refusal.retry_after_s)
        if monotonic() + wait_s > self._until_s:
            return False
        await asyncio.sleep(wait_s)
        return True


class Gateways:
    """One or several gateways in front of the same nodes. All calls go to one of them until it is lost.

    Args:
        retry_s: see `Retries`.

    Raises:
        ConfigError: the CA cannot be read, or the API key would cross a network unencrypted.
    """

    def __init__(
        self, targets: Sequence[str], *, api_key: str | None, tls_ca: str | Path | None, retry_s: float | None
    ) -> None:
        distinct = list(dict.fromkeys(targets))
        attempt_s = ATTEMPT_S if len(distinct) == 1 else SHORT_ATTEMPT_S
        self.all = [
            Gateway(each, dial_gateway(each, api_key=api_key, tls_ca=tls_ca), attempt_s=attempt_s) for each in distinct
        ]
        self.retry_s = retry_s
        self._current = 0

    @property
    def current(self) -> Gateway:
        """The gateway for the next call."""
        return self.all[self._current]

    def leave(self, gateway: Gateway) -> None:
        """Switches to the next gateway, unless another request already left this one."""
        if self.current is gateway:
            self._current = (self._current + 1) % len(self.all)

    async def close(self) -> None:
        for gateway in self.all:
            await gateway.close()

    async def ask(
        self,
        ask: Callable[[Gateway, float | None], Awaitable[Answer]],
        *,
        timeout_s: float | None,
        retry_s: float | None = None,
    ) -> Answer:
        """Returns the answer of the first gateway that gives one.

        Args:
            ask: calls the gateway; its second argument is the time left in seconds, or None without a deadline.
            retry_s: overrides the client's `retry_s`.

        Raises:
            BatonError: all gateways are lost, or one of them refused the call.
        """
        deadline_s = None if timeout_s is None else monotonic() + min(timeout_s, TIMEOUT_S_MAX)
        retries = Retries(deadline_s, self.retry_s if retry_s is None else retry_s)
        while True:
            try:
                return await self._ask_once(ask, retries)
            except BatonError as error:
                if not await retries.wait(error):
                    raise

    async def _ask_once(self, ask: Callable[[Gateway, float | None], Awaitable[Answer]], retries: Retries) -> Answer:
        for last in reversed(range(len(self.all))):
            gateway = self.current
            try:
                with typed_errors(gateway):
                    return await ask(gateway, retries.left_s())
            except LostGateway as lost:
                if not last:
                    raise lost.error from None
                self.leave(gateway)
        raise AssertionError("the last gateway answers or raises")


@contextmanager
def typed_errors(gateway: Gateway) -> Iterator[None]:
    """Converts gRPC errors to `BatonError`.

    Raises:
        LostGateway: this gateway is unreachable or draining; another one may answer.
        BatonError: every other gRPC status.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        typed, target = from_rpc_error(error), gateway.target
        from_gateway = any(key == "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ())
        if isinstance(typed, Draining):
            raise LostGateway(typed) from None
        if from_gateway:
            raise typed from None
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            raise LostGateway(_unreachable(gateway, last_cause(error))) from None
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            cure = "give the address of a gateway, not of a node; an older gateway lacks newer calls"
            raise NoNode(f"{target} is not a gateway", field="target", value=target, cure=cure) from None
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise DeadlineExceeded("the request did not finish in time", cure="allow more time") from None
        if error.code() in _BROKEN_STREAM:
            raise LostGateway(typed) from None
        raise typed from None


def _unreachable(gateway: Gateway, cause: str) -> NoNode:
    target, through = gateway.target, ""
    cure = "start a gateway there, or give the address of a running one; a gateway with TLS needs BATON_CLIENT_CA"
    if gateway.proxy is not None:
        through = f" through the proxy {gateway.proxy}"
        cure = f"add the host to no_proxy to reach it directly, or correct {gateway.proxy.variable}; else {cure}"
    return NoNode(f"cannot reach {target}{through}: {cause}", field="target", value=target, cure=cure)
