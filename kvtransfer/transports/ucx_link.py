"""One link of the UCX transport. All calls of ucxx about one peer are here, and an exception breaks only that link."""

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from baton.core.errors import BatonError, DataLoss, InternalError
from kvtransfer.transports.transport import Arrival

_TRANSPORTS_FIELD = 1 << 3
_LANES_MAX = 32
# Maximum number of events handled in one call, so that the thread's other work gets its turn.
_EVENTS_MAX = 256
# Time for a closed link's requests to become cancelled; most take a few calls of progress.
_CANCEL_S = 0.25


class UcxRequest:
    """A request of ucxx; keeps its memory alive.

    Args:
        request: None if it could not begin, for the reason `why`.
        on_error: called when ucxx cannot report the request's state.
    """

    def __init__(self, request: Any, memory: Any, *, on_error: Callable[[str], None], why: str = "") -> None:
        self._request = request
        self._memory = memory
        self._on_error = on_error
        self._why = why

    @property
    def done(self) -> bool:
        if self._request is None:
            return True
        try:
            return bool(self._request.completed)
        except Exception as error:  # noqa: BLE001  (as in every call of ucxx)
            self._on_error(_describe(error))
            self.abandon(_describe(error))
            return True

    def abandon(self, why: str) -> None:
        """Gives up a request that nothing will complete."""
        self._request, self._why = None, why

    def failure(self) -> BatonError | None:
        if self._request is None:
            return DataLoss(f"UCX: {self._why}")
        try:
            self._request.check_error()
        except Exception as error:  # noqa: BLE001  (as in every call of ucxx)
            return DataLoss(f"UCX: {_describe(error)}")
        return None


class UcxLink:
    """The worker for one peer, its endpoint once connected, and the requests that may not be done.

    Each peer has its own worker. Over shared memory, all senders to one worker write to one queue, after claiming an
    element: a sender killed or stopped between claim and completion leaves a hole that blocks every other sender. With
    one worker for all peers this happened in 17 % of the kills in mid-transfer.

    `open`, `connect` and `lanes` raise DataLoss for any exception of ucxx. After an exception in another method the
    link is broken, and `failure` says why.

    Args:
        ucx: `ucxx._lib.libucxx`.
        as_memory: ucxx's handle of a tensor's memory.
    """

    def __init__(self, ucx: Any, as_memory: Callable[[Tensor], Any]) -> None:
        self._ucx = ucx
        self._as_memory = as_memory
        self.worker: Any = None
        self.endpoint: Any = None
        self.peer_on_gpu = False
        self.requests: list[UcxRequest] = []
        self.failure: BatonError | None = None
        self.failure_reported = False
        # Messages arrive only through progress.
        self.may_have_arrivals = False
        self.descriptor = -1
        self.closed_s = 0.0

    def open(self, context: Any) -> bytes:
        """Makes the worker; returns its address."""
        try:
            with _as_data_loss():
                self.worker = self._ucx.UCXWorker(context)
                self.worker.init_blocking_progress_mode()
                self.descriptor = int(self.worker.epoll_file_descriptor)
                return bytes(self.worker.address.tobytes())
        except DataLoss:
            self.release()
            raise

    def connect(self, address: bytes) -> None:
        with _as_data_loss():
            self.endpoint = self._ucx.UCXEndpoint.create_from_worker_address(
                self.worker, self._ucx.UCXAddress.create_from_buffer(address), endpoint_error_handling=True
            )

    def lanes(self) -> list[str]:
        with _as_data_loss():
            return _lanes(self.endpoint.handle)

    def send(self, tag: int, message: Tensor) -> UcxRequest:
        return self._begin(message, lambda memory: self.endpoint.tag_send(memory, self._ucx.UCXXTag(tag)))

    def receive(self, handle: Any, into: Tensor) -> UcxRequest:
        return self._begin(into, lambda memory: self.endpoint.tag_recv_with_handle(memory, handle))

    def discard(self, handle: Any, into: Tensor) -> UcxRequest:
        """Receives through the worker: the peer may not be connected."""
        return self._begin(into, lambda memory: self.worker.tag_recv_with_handle(memory, handle))

    def probe(self, peer: int, any_tag: tuple[Any, Any]) -> Arrival | None:
        """A message that has arrived; `peer` is this link's number."""
        try:
            found = self.worker.tag_probe(*any_tag, True)
            if found.matched:
                return Arrival(peer, int(found.sender_tag.value), int(found.length), found)
        except Exception as error:  # noqa: BLE001  (as in every call of ucxx)
            self.fail(_describe(error))
        self.may_have_arrivals = False
        return None

    def progress(self) -> bool:
        # NOTE: not `worker.progress`: it does not return whether anything happened, runs until nothing happens any
        # more, and may wait seconds for cancelled requests.
        moved = False
        try:
            for _ in range(_EVENTS_MAX):
                if not self.worker.progress_once():
                    break
                moved = True
            if moved and self.endpoint is not None and not self.endpoint.alive:
                self.fail("the peer has closed the link, or is gone")
        except Exception as error:  # noqa: BLE001  (as in every call of ucxx)
            self.fail(_describe(error))
        if moved:
            self.may_have_arrivals = True
            self.idle()
        return moved

    def arm(self) -> bool:
        """True if the next event makes the descriptor readable; a broken link has no further events."""
        if self.failure is not None:
            return True
        try:
            return bool(self.worker.arm())
        except Exception as error:  # noqa: BLE001  (as in every call of ucxx)
            self.fail(_describe(error))
            return False

    def idle(self) -> bool:
        """Whether no request is in flight."""
        self.requests = [request for request in self.requests if not request.done]
        return not self.requests

    def close(self) -> None:
        """Cancels the requests; further progress completes them."""
        self.closed_s = time.monotonic()
        try:
            # NOTE: closing an endpoint crashes if an error has closed it already.
            if self.endpoint is not None and self.endpoint.alive:
                self.endpoint.close_blocking()
        except Exception as error:  # noqa: BLE001  (as in every call of ucxx)
            self.fail(_describe(error))
        self.endpoint = None

    def ended(self) -> bool:
        """Whether a closed link has ended: its requests are done or, after a timeout, abandoned. Then releases it."""
        if not self.idle() and time.monotonic() - self.closed_s < _CANCEL_S:
            return False
        self.release()
        return True

    def release(self) -> None:
        """Destroys the worker.

        NOTE: not left to the last reference: the traceback of an error that closed the link refers to it, and is part
        of a cycle. A node collects such cycles rarely, and each worker has a dozen descriptors and megabytes.
        """
        # Seen with senders that were stopped in mid-transfer and continued after the receiver had closed the link.
        for request in self.requests:
            request.abandon("the link was closed")
        self.requests.clear()
        self.endpoint = self.worker = None

    def fail(self, why: str) -> None:
        """Marks the link as broken. The first reason is kept."""
        self.failure = self.failure or DataLoss(f"UCX: {why}")

    def _begin(self, message: Tensor, begin: Callable[[Any], Any]) -> UcxRequest:
        try:
            memory = self._as_memory(message)
            request = UcxRequest(begin(memory), memory, on_error=self.fail)
        except Exception as error:  # noqa: BLE001  (as in every call of ucxx)
            self.fail(_describe(error))
            return UcxRequest(None, message, on_error=self.fail, why=_describe(error))
        self.requests.append(request)
        return request


@contextmanager
def _as_data_loss() -> Iterator[None]:
    """Turns any exception of ucxx into DataLoss: ucxx makes its exception types at run time."""
    try:
        yield
    except BatonError:
        raise
    except Exception as error:  # noqa: BLE001  (as in every call of ucxx)
        raise DataLoss(f"UCX: {_describe(error)}") from None


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class _Lane(ctypes.Structure):
    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Lanes(ctypes.Structure):
    _fields_ = (("entries", ctypes.POINTER(_Lane)), ("count", ctypes.c_uint), ("entry_size", ctypes.c_size_t))


class _EndpointAttributes(ctypes.Structure):
    """`ucp_ep_attr_t` of UCX 1.12 and later."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_address", ctypes.c_char * 128),
        ("remote_address", ctypes.c_char * 128),
        ("lanes", _Lanes),
        ("user_data", ctypes.c_void_p),
    )


def _lanes(endpoint_handle: int) -> list[str]:
    """The transports of an endpoint, from UCX itself; ucxx has no call for it."""
    entries = (_Lane * _LANES_MAX)()
    attributes = _EndpointAttributes(field_mask=_TRANSPORTS_FIELD)
    attributes.lanes = _Lanes(entries, _LANES_MAX, ctypes.sizeof(_Lane))
    query = ctypes.CDLL("libucp.so.0").ucp_ep_query
    query.argtypes = (ctypes.c_void_p, ctypes.POINTER(_EndpointAttributes))
    status = query(endpoint_handle, ctypes.byref(attributes))
    if status != 0 or attributes.lanes.count == 0:
        raise InternalError(f"UCX did not report which transport it uses (status {status})")
    return [entries[index].transport.decode() for index in range(attributes.lanes.count)]
