"""The UCX transport, on ucxx: shared memory, tcp, RDMA or GPU copies, as UCX chooses for each pair.

Endpoints have error handling on both ends: without it, a peer that dies in mid-transfer takes this process with it.
Receives go through the endpoint, because closing it cancels only those.
"""

import ctypes
import os
import resource
import select
from typing import Any

import torch
from torch import Tensor

from baton.core.errors import BatonError, ConfigError, DataLoss, Overloaded
from kvtransfer.transports.transport import Arrival
from kvtransfer.transports.ucx_address import is_on_gpu, worker_address, wrap
from kvtransfer.transports.ucx_link import UcxLink, UcxRequest

# Shared memory takes part in error handling only with this setting; otherwise UCX falls back to tcp.
_CONTEXT = {"MM_ERROR_HANDLING": "y"}

# Zero-copy lanes, if there are any, carry the bulk; another lane carries small messages.
_BULK_LANES = ("xpmem", "knem", "cma")
_GPU_LANE = "cuda_ipc"
_GPU_LANES = ("cuda_ipc", "cuda_copy", "gdr_copy")
# Maximum number of cached memory handles; more than slots x message sizes.
_ARRAYS_MAX = 64
# No link is opened with fewer descriptors left; one takes about a dozen.
_DESCRIPTORS_SPARE = 128


class UcxTransport:
    """The links of one node, each a UCX worker with one endpoint.

    Args:
        on_gpu: messages to peers that can reach it are in memory of the GPU that is current on this thread.
        ucxx: ucxx's bindings or a replacement; None: `ucxx._lib`.
    """

    def __init__(self, *, on_gpu: bool = False, ucxx: Any = None) -> None:
        self._on_gpu = on_gpu
        bindings = _bindings() if ucxx is None else ucxx
        _silence_unused_variables()
        self._ucx: Any = bindings.libucxx
        self._as_array: Any = bindings.arr.Array
        try:
            self._context: Any = self._ucx.UCXContext(_CONTEXT)
        except Exception as error:  # noqa: BLE001  (ucxx makes its exception types at run time)
            cure = "check which transports and devices the UCX_* variables allow, UCX_TLS first"
            raise ConfigError(f"UCX cannot start: {error}", cure=cure) from None
        self._any_tag = self._ucx.UCXXTag(0), self._ucx.UCXXTagMask(0)
        self._links: dict[int, UcxLink] = {}
        # Closed links whose requests are not done: their memory may still be written to.
        self._ending: list[UcxLink] = []
        # ucxx's handles of messages' memory, cached with the tensors, because staging slots are reused.
        self._arrays: dict[int, tuple[Tensor, Any]] = {}
        self._scrap = torch.empty(1, dtype=torch.uint8)
        self._poll = select.epoll()

    def listen(self, peer: int) -> bytes:
        assert peer not in self._links
        _check_descriptors()
        link = UcxLink(self._ucx, self._array)
        address = link.open(self._context)
        self._poll.register(link.descriptor, select.EPOLLIN)
        self._links[peer] = link
        return wrap(address, on_gpu=self._on_gpu)

    def connect(self, peer: int, address: bytes) -> None:
        link = self._links[peer]
        assert link.endpoint is None
        content = worker_address(address)
        link.peer_on_gpu = is_on_gpu(address)
        link.connect(content)

    def disconnect(self, peer: int) -> None:
        link = self._links.pop(peer, None)
        if link is None:
            return
        self._poll.unregister(link.descriptor)
        link.close()
        self._ending.append(link)

    def carrier(self, peer: int) -> str:
        link = self._links[peer]
        lanes = link.lanes()
        # UCX has lanes for GPU memory wherever there are GPUs, used or not.
        if self._on_gpu and link.peer_on_gpu and _GPU_LANE in lanes:
            return _GPU_LANE
        of_host = [lane for lane in lanes if lane not in _GPU_LANES]
        if not of_host:
            raise DataLoss(f"UCX: no lane for host memory among {', '.join(lanes)}")
        return next((lane for lane in _BULK_LANES if lane in of_host), of_host[0])

    def send(self, peer: int, tag: int, message: Tensor) -> UcxRequest:
        return self._links[peer].send(tag, message)

    def probe(self) -> Arrival | None:
        for peer, link in self._links.items():
            if link.may_have_arrivals and (arrival := link.probe(peer, self._any_tag)) is not None:
                return arrival
        return None

    def receive(self, arrival: Arrival, into: Tensor) -> UcxRequest:
        return self._links[arrival.peer].receive(arrival.handle, into)

    def discard(self, arrival: Arrival) -> None:
        # UCX ends a receive into too little memory at once, as truncated, and the sender's request succeeds: tested for
        # eager and rendezvous messages, and for peers without an endpoint.
        if link := self._links.get(arrival.peer):
            link.discard(arrival.handle, self._scrap)

    def progress(self) -> bool:
        moved = False
        for link in (*self._links.values(), *self._ending):
            moved = link.progress() or moved
        if self._ending:
            self._ending = [link for link in self._ending if not link.ended()]
        return moved

    def failures(self) -> list[tuple[int, BatonError]]:
        found = []
        for peer, link in self._links.items():
            if link.failure is not None and not link.failure_reported:
                link.failure_reported = True
                found.append((peer, link.failure))
        return found

    def arm(self) -> bool:
        return all(link.arm() for link in self._links.values())

    def fileno(self) -> int:
        return self._poll.fileno()

    def close(self) -> None:
        for peer in list(self._links):
            self.disconnect(peer)
        while self.progress():
            pass
        # The order matters: requests, then endpoints (gone by now), then the workers, then the context.
        for link in self._ending:
            link.release()
        self._ending.clear()
        self._arrays.clear()
        self._poll.close()
        self._context = None

    def _array(self, tensor: Tensor) -> Any:
        known = self._arrays.get(id(tensor))
        if known is not None:
            return known[1]
        array = self._as_array(tensor.numpy() if tensor.device.type == "cpu" else tensor)
        # NOTE: a handle keeps its memory. Memory that is not part of a larger one was made for this message alone.
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            if len(self._arrays) == _ARRAYS_MAX:
                self._arrays.clear()
            self._arrays[id(tensor)] = tensor, array
        return array


def _bindings() -> Any:
    from ucxx import _lib
    from ucxx._lib import arr, libucxx  # noqa: F401  (makes them attributes of `_lib`)

    return _lib


def _check_descriptors() -> None:
    """Refuses a link before file descriptors run out, because UCX ends a process that gets none.

    Raises:
        Overloaded: nearly all descriptors of this process are in use.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and len(os.listdir("/proc/self/fd")) > limit - _DESCRIPTORS_SPARE:
        what = f"fewer than {_DESCRIPTORS_SPARE} of {limit} file descriptors are left"
        raise Overloaded(what, cure="raise the limit on open files", retry_after_s=1.0)


def _silence_unused_variables() -> None:
    """Turns off UCX's report of unused variables on stdout: importing ucxx sets variables that UCX does not use."""
    set_value = ctypes.CDLL("libucs.so.0").ucs_global_opts_set_value
    set_value.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    set_value(b"WARN_UNUSED_ENV_VARS", b"n")
