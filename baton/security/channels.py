"""A gRPC channel that adds metadata to every call, and switches to new credentials without ending running calls."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc

Options = Sequence[tuple[str, Any]]
Metadata = tuple[tuple[str, str], ...]


class _Opened:
    """One underlying channel. Closes when it is retired and its calls have ended."""

    def __init__(self, channel: grpc.aio.Channel, secrets: object) -> None:
        self.channel = channel
        self.secrets = secrets
        self._calls = 0
        self._retired = False
        self._methods: dict[object, Any] = {}
        self._closing: asyncio.Task[None] | None = None

    def call(self, method: "_Method", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = self._methods.get(method)
        if made is None:
            made = self._methods[method] = getattr(self.channel, method.kind)(*method.args, **method.kwargs)
        call = made(*args, **kwargs)
        self._calls += 1
        call.add_done_callback(self._ended)
        return call

    @property
    def closing(self) -> bool:
        return self._closing is not None

    def retire(self) -> None:
        self._retired = True
        self._close_if_idle()

    def _ended(self, _: object) -> None:
        self._calls -= 1
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._retired and not self._calls and self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self.channel.close(), name="close-channel")


class _Method:
    """One method of a stub, called on the current underlying channel."""

    def __init__(self, channel: "KeyedChannel", kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.kind = kind
        self.args = args
        self.kwargs = kwargs
        self._channel = channel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if extra := self._channel.metadata:
            kwargs["metadata"] = (*(kwargs.get("metadata") or ()), *extra)
        return self._channel.present().call(self, args, kwargs)


class KeyedChannel(grpc.aio.Channel):
    """A channel that reconnects with new secrets when they change.

    Args:
        open_channel: opens an underlying channel with the given secrets.
        secrets: returns the current secrets, and the same object until they change.
        metadata: added to every call.
    """

    def __init__(
        self, open_channel: Callable[[Any], grpc.aio.Channel], secrets: Callable[[], object], metadata: Metadata = ()
    ) -> None:
        self.metadata = metadata
        self._open = open_channel
        self._secrets = secrets
        self._retired: list[_Opened] = []  # channels with running calls
        found = secrets()
        self._opened = _Opened(open_channel(found), found)

    def present(self) -> _Opened:
        found = self._secrets()
        if found is not self._opened.secrets:
            old, self._opened = self._opened, _Opened(self._open(found), found)
            old.retire()
            self._retired = [each for each in (*self._retired, old) if not each.closing]
        return self._opened

    async def __aenter__(self) -> "KeyedChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for opened in (*self._retired, self._opened):
            await opened.channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._opened.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._opened.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._opened.channel.channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "stream_stream", args, kwargs)
