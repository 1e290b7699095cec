"""The UCX transport, on ucxx: shared memory, tcp, RDMA or GPU copies, as UCX chooses for each pair.

Endpoints have error handling on both ends: without it, a peer that dies in mid-transfer takes this process with it.
Receives go through the endpoint, because closing it cancels only those.
"""

import ctypes
import select
import time
import zlib
from typing import Any

import numpy as np
from torch import Tensor

from baton.errors import BatonError, ConfigError, DataLoss, InternalError, PeerRefused
from kvtransfer.transports.transport import Arrival

# Shared memory takes part in error handling only with this setting; otherwise UCX falls back to tcp.
_CONTEXT = {"MM_ERROR_HANDLING": "y"}

# An address is this prefix, a checksum of the rest, whether the node offers GPU memory, and the worker's address.
_ADDRESS_MAGIC = b"baton-ucx-2:"
_ON_GPU = {True: b"g", False: b"h"}
# Zero-copy lanes, where there are any, carry the bulk; another lane carries small messages.
_BULK_LANES = ("xpmem", "knem", "cma")
_GPU_LANE = "cuda_ipc"
_GPU_LANES = ("cuda_ipc", "cuda_copy", "gdr_copy")
_TRANSPORTS_FIELD = 1 << 3
_LANES_MAX = 32
# Maximum number of events handled in one call, so that the thread's other work gets its turn.
_EVENTS_MAX = 256
# Maximum number of cached memory handles; more than slots x message sizes.
_ARRAYS_MAX = 64
# Time for a closed link's requests to become cancelled; most take a few calls of progress.
_CANCEL_S = 0.25


class _Request:
    """A request of ucxx; keeps its memory alive."""

    def __init__(self, request: Any, memory: Any) -> None:
        self._request = request
        self._memory = memory

    @property
    def done(self) -> bool:
        return self._request is None or bool(self._request.completed)

    def abandon(self) -> None:
        """Gives up a request that nothing will complete, because its worker is gone."""
        self._request = None

    def failure(self) -> BatonError | None:
        if self._request is None:
            return DataLoss("UCX: the link was closed")
        try:
            self._request.check_error()
        except Exception as error:  # noqa: BLE001  (ucxx makes its exception types at run time)
            return DataLoss(f"UCX: {error}")
        return None


class _Link:
    """The worker for one peer, its endpoint once connected, and the requests that may not be done.

    Each peer has its own worker. Over shared memory, all senders to one worker write to one queue, after claiming an
    element: a sender killed or stopped between claim and completion leaves a hole that blocks every other sender. With
    one worker for all peers this happened in 17 % of the kills in mid-transfer.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.endpoint: Any = None
        self.peer_on_gpu = False
        self.requests: list[_Request] = []
        # Messages arrive only through progress.
        self.may_have_arrivals = False
        self.closed_s = 0.0

    def track(self, request: _Request) -> _Request:
        self.requests.append(request)
        return request

    def progress(self) -> bool:
        # NOTE: not `worker.progress`: it does not return whether anything happened, runs until nothing happens any
        # more, and may wait seconds for cancelled requests.
        moved = False
        for _ in range(_EVENTS_MAX):
            if not self.worker.progress_once():
                break
            moved = True
        if moved:
            self.may_have_arrivals = True
            self.idle()
        return moved

    def idle(self) -> bool:
        """Whether no request is in flight."""
        self.requests = [request for request in self.requests if not request.done]
        return not self.requests

    def close(self) -> None:
        """Cancels the requests; further progress completes them."""
        self.closed_s = time.monotonic()
        # NOTE: closing an endpoint crashes if an error has closed it already.
        if self.endpoint is not None and self.endpoint.alive:
            self.endpoint.close_blocking()
        self.endpoint = None

    def ended(self) -> bool:
        """Whether a closed link's requests are done; after a timeout they are abandoned."""
        if self.idle():
            return True
        if time.monotonic() - self.closed_s < _CANCEL_S:
            return False
        # Seen with senders that were stopped in mid-transfer and continued after the receiver had closed the link.
        for request in self.requests:
            request.abandon()
        return True


class UcxTransport:
    """The links of one node, each a UCX worker with one endpoint.

    Args:
        on_gpu: messages are in memory of the GPU that is current on this thread, where the peer can reach it.
    """

    def __init__(self, *, on_gpu: bool = False) -> None:
        from ucxx._lib import arr, libucxx

        self._on_gpu = on_gpu
        _silence_unused_variables()
        self._ucx: Any = libucxx
        self._as_array: Any = arr.Array
        try:
            self._context: Any = libucxx.UCXContext(_CONTEXT)
        except Exception as error:  # noqa: BLE001  (ucxx makes its exception types at run time)
            cure = "check which transports and devices the UCX_* variables allow, UCX_TLS first"
            raise ConfigError(f"UCX cannot start: {error}", cure=cure) from None
        self._any_tag = libucxx.UCXXTag(0), libucxx.UCXXTagMask(0)
        self._links: dict[int, _Link] = {}
        # Closed links whose requests are not done: their memory may still be written to.
        self._ending: list[_Link] = []
        # ucxx's handles of messages' memory, cached with the tensors, because staging slots are reused.
        self._arrays: dict[int, tuple[Tensor, Any]] = {}
        self._poll = select.epoll()

    def listen(self, peer: int) -> bytes:
        assert peer not in self._links
        link = self._links[peer] = _Link(self._ucx.UCXWorker(self._context))
        link.worker.init_blocking_progress_mode()
        self._poll.register(link.worker.epoll_file_descriptor, select.EPOLLIN)
        return _wrap(_ON_GPU[self._on_gpu] + bytes(link.worker.address.tobytes()))

    def connect(self, peer: int, address: bytes) -> None:
        link = self._links[peer]
        assert link.endpoint is None
        content = _unwrap(address)
        link.peer_on_gpu = content[:1] == _ON_GPU[True]
        link.endpoint = self._ucx.UCXEndpoint.create_from_worker_address(
            link.worker,
            self._ucx.UCXAddress.create_from_buffer(content[1:]),
            endpoint_error_handling=True,
        )

    def disconnect(self, peer: int) -> None:
        link = self._links.pop(peer, None)
        if link is None:
            return
        self._poll.unregister(link.worker.epoll_file_descriptor)
        link.close()
        self._ending.append(link)

    def carrier(self, peer: int) -> str:
        link = self._links[peer]
        lanes = _lanes(link.endpoint.handle)
        # UCX has lanes for GPU memory wherever there are GPUs, used or not.
        if self._on_gpu and link.peer_on_gpu and _GPU_LANE in lanes:
            return _GPU_LANE
        of_host = [lane for lane in lanes if lane not in _GPU_LANES]
        return next((lane for lane in _BULK_LANES if lane in of_host), of_host[0])

    def send(self, peer: int, tag: int, message: Tensor) -> _Request:
        link, memory = self._links[peer], self._array(message)
        return link.track(_Request(link.endpoint.tag_send(memory, self._ucx.UCXXTag(tag)), memory))

    def probe(self) -> Arrival | None:
        for peer, link in self._links.items():
            if not link.may_have_arrivals:
                continue
            found = link.worker.tag_probe(*self._any_tag, True)
            if found.matched:
                return Arrival(peer, int(found.sender_tag.value), int(found.length), found)
            link.may_have_arrivals = False
        return None

    def receive(self, arrival: Arrival, into: Tensor) -> _Request:
        link, memory = self._links[arrival.peer], self._array(into)
        return link.track(_Request(link.endpoint.tag_recv_with_handle(memory, arrival.handle), memory))

    def discard(self, arrival: Arrival) -> None:
        link = self._links.get(arrival.peer)
        if link is None:
            return
        # UCX ends a receive into too little memory at once, as truncated, and the sender's request succeeds: tested for
        # eager and rendezvous messages, and for peers without an endpoint.
        memory = self._as_array(np.empty(1, dtype=np.uint8))
        link.track(_Request(link.worker.tag_recv_with_handle(memory, arrival.handle), memory))

    def progress(self) -> bool:
        moved = False
        for link in (*self._links.values(), *self._ending):
            moved = link.progress() or moved
        if self._ending:
            self._ending = [link for link in self._ending if not link.ended()]
        return moved

    def arm(self) -> bool:
        return all(link.worker.arm() for link in self._links.values())

    def fileno(self) -> int:
        return self._poll.fileno()

    def close(self) -> None:
        for peer in list(self._links):
            self.disconnect(peer)
        while self.progress():
            pass
        # The order matters: requests, then endpoints (gone by now), then the workers, then the context.
        for link in self._ending:
            link.requests.clear()
        self._ending.clear()
        self._arrays.clear()
        self._poll.close()
        self._context = None

    def _array(self, tensor: Tensor) -> Any:
        known = self._arrays.get(id(tensor))
        if known is None:
            if len(self._arrays) == _ARRAYS_MAX:
                self._arrays.clear()
            array = self._as_array(tensor.numpy() if tensor.device.type == "cpu" else tensor)
            known = self._arrays[id(tensor)] = (tensor, array)
        return known[1]


def _wrap(content: bytes) -> bytes:
    return _ADDRESS_MAGIC + zlib.crc32(content).to_bytes(4, "little") + content


def _unwrap(address: bytes) -> bytes:
    """An address's content. UCX does not check addresses, so damaged ones must not reach it."""
    checksum, content = address[len(_ADDRESS_MAGIC) :][:4], address[len(_ADDRESS_MAGIC) + 4 :]
    if not address.startswith(_ADDRESS_MAGIC) or zlib.crc32(content).to_bytes(4, "little") != checksum:
        raise PeerRefused(
            "the peer's address is not one of a UCX worker",
            field="address",
            value=address[:40],
            cure="start both nodes with the same --transport and the same package version",
        )
    return content


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


def _silence_unused_variables() -> None:
    """Turns off UCX's report of unused variables on stdout: importing ucxx sets variables that UCX does not use."""
    set_value = ctypes.CDLL("libucs.so.0").ucs_global_opts_set_value
    set_value.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    set_value(b"WARN_UNUSED_ENV_VARS", b"n")
