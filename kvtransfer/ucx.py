"""UCX, through ucxx: shared memory, tcp, RDMA or GPU copies, whichever is there, chosen by UCX for each pair.

The only module that knows ucxx. Endpoints are made from worker addresses, with error handling on both ends: without
it a peer that dies in mid-transfer takes this process with it. Receives go through the endpoint, because only those
are cancelled when it is closed.
"""

import ctypes
import zlib
from typing import Any

import numpy as np
from torch import Tensor

from baton.errors import BatonError, DataLoss, InternalError, PeerRefused
from kvtransfer.transport import Arrival

# Shared memory takes part in error handling only with this setting; otherwise UCX falls back to tcp.
_CONTEXT = {"MM_ERROR_HANDLING": "y"}

_ADDRESS_MAGIC = b"baton-ucx-1:"
# Zero-copy lanes stand beside the lane for small messages, and carry the bulk where there is one.
_BULK_LANES = ("cuda_ipc", "xpmem", "knem", "cma")
_TRANSPORTS_FIELD = 1 << 3
_LANES_MAX = 32
# Events handled at one look, so that the thread's other work gets its turn.
_EVENTS_MAX = 256


class _Request:
    """A request of ucxx; keeps its memory alive."""

    def __init__(self, request: Any, memory: Any) -> None:
        self._request = request
        self._memory = memory

    @property
    def done(self) -> bool:
        return bool(self._request.completed)

    def failure(self) -> BatonError | None:
        try:
            self._request.check_error()
        except Exception as error:  # noqa: BLE001  (ucxx makes its exception types at run time)
            return DataLoss(f"UCX: {error}")
        return None


class UcxTransport:
    """One UCX worker and its endpoints."""

    def __init__(self) -> None:
        from ucxx._lib import arr, libucxx

        _silence_unused_variables()
        self._ucx: Any = libucxx
        self._as_array: Any = arr.Array
        self._context: Any = libucxx.UCXContext(_CONTEXT)
        self._worker: Any = libucxx.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self._any_tag = libucxx.UCXXTag(0), libucxx.UCXXTagMask(0)
        self._endpoints: dict[int, Any] = {}
        self._discarding: list[_Request] = []
        address = bytes(self._worker.address.tobytes())
        self.address = _ADDRESS_MAGIC + zlib.crc32(address).to_bytes(4, "little") + address

    def connect(self, peer: int, address: bytes) -> None:
        assert peer not in self._endpoints
        self._endpoints[peer] = self._ucx.UCXEndpoint.create_from_worker_address(
            self._worker,
            self._ucx.UCXAddress.create_from_buffer(_unwrap(address)),
            endpoint_error_handling=True,
        )

    def disconnect(self, peer: int) -> None:
        endpoint = self._endpoints.pop(peer, None)
        # NOTE: closing an endpoint that an error has closed already crashes.
        if endpoint is not None and endpoint.alive:
            endpoint.close_blocking()

    def carrier(self, peer: int) -> str:
        lanes = _lanes(self._endpoints[peer].handle)
        return next((lane for lane in _BULK_LANES if lane in lanes), lanes[0])

    def send(self, peer: int, tag: int, message: Tensor) -> _Request:
        memory = self._array(message)
        return _Request(self._endpoints[peer].tag_send(memory, self._ucx.UCXXTag(tag)), memory)

    def probe(self) -> Arrival | None:
        found = self._worker.tag_probe(*self._any_tag, True)
        if not found.matched:
            return None
        return Arrival(int(found.sender_tag.value), int(found.length), found)

    def receive(self, peer: int, arrival: Arrival, into: Tensor) -> _Request:
        memory = self._array(into)
        return _Request(self._endpoints[peer].tag_recv_with_handle(memory, arrival.handle), memory)

    def discard(self, arrival: Arrival) -> None:
        # UCX ends a receive whose memory is too small at once, as truncated, and tells the sender that all is well:
        # measured for eager and rendezvous messages. It does so also for peers without an endpoint.
        memory = self._as_array(np.empty(1, dtype=np.uint8))
        self._discarding.append(_Request(self._worker.tag_recv_with_handle(memory, arrival.handle), memory))

    def progress(self) -> bool:
        if self._discarding:
            self._discarding = [request for request in self._discarding if not request.done]
        # NOTE: not `worker.progress`, which does not say whether there was anything to do, goes on for as long as there
        # is, and may wait for seconds for cancelled requests.
        moved = False
        for _ in range(_EVENTS_MAX):
            if not self._worker.progress_once():
                break
            moved = True
        return moved

    def arm(self) -> bool:
        return bool(self._worker.arm())

    def fileno(self) -> int:
        return int(self._worker.epoll_file_descriptor)

    def close(self) -> None:
        for peer in list(self._endpoints):
            self.disconnect(peer)
        while self.progress():
            pass
        # The order matters: requests, then endpoints (gone by now), then the worker, then the context.
        self._discarding.clear()
        self._worker = None
        self._context = None

    def _array(self, tensor: Tensor) -> Any:
        return self._as_array(tensor.numpy() if tensor.device.type == "cpu" else tensor)


def _unwrap(address: bytes) -> bytes:
    """The worker's address. UCX reads addresses without checking them, so damaged ones must not reach it."""
    checksum, worker = address[len(_ADDRESS_MAGIC) :][:4], address[len(_ADDRESS_MAGIC) + 4 :]
    if not address.startswith(_ADDRESS_MAGIC) or zlib.crc32(worker).to_bytes(4, "little") != checksum:
        raise PeerRefused(
            "the peer's address is not one of a UCX worker",
            field="address",
            value=address[:40],
            cure="start both nodes with the same --transport and the same package version",
        )
    return worker


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
    """The transports of an endpoint as UCX reports them; ucxx has no call for it."""
    entries = (_Lane * _LANES_MAX)()
    attributes = _EndpointAttributes(field_mask=_TRANSPORTS_FIELD)
    attributes.lanes = _Lanes(entries, _LANES_MAX, ctypes.sizeof(_Lane))
    query = ctypes.CDLL("libucp.so.0").ucp_ep_query
    query.argtypes = (ctypes.c_void_p, ctypes.POINTER(_EndpointAttributes))
    status = query(endpoint_handle, ctypes.byref(attributes))
    if status != 0 or attributes.lanes.count == 0:
        raise InternalError(f"UCX does not say which transport it uses (status {status})")
    return [entries[index].transport.decode() for index in range(attributes.lanes.count)]


def _silence_unused_variables() -> None:
    """Importing ucxx sets variables for UCX that UCX then reports as unused, on stdout: turns that report off."""
    set_value = ctypes.CDLL("libucs.so.0").ucs_global_opts_set_value
    set_value.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    set_value(b"WARN_UNUSED_ENV_VARS", b"n")
