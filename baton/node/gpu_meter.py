"""Memory, use and power of a node's GPUs, read from the driver's NVML every few seconds.

NVML is a library of the driver, so it is loaded by name and needs no package. Only the calls that every driver has had
for ten years are used. Without the library a node reports no GPUs, and serves normally.
"""

import asyncio
import ctypes
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from baton.node.ranks.join import rank_device
from baton.protos.v1 import node_status_pb2
from baton.settings.node_config import NodeSettings

_log = logging.getLogger(__name__)

_READ_EVERY_S = 2.0
_LIBRARY = "libnvidia-ml.so.1"
_NAME_BYTES = 96


class NvmlError(Exception):
    """NVML is absent, or refuses a call."""


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t, in percent of the last sampling period."""

    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class Nvml:
    """The calls of NVML that a node needs.

    Args:
        library: the loaded library.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._call("nvmlInit_v2")

    def gpu(self, uuid: str) -> ctypes.c_void_p:
        """The handle of the GPU with this UUID, such as "GPU-8a4f...".

        Raises:
            NvmlError: no GPU has this UUID.
        """
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        return handle

    def state(self, handle: ctypes.c_void_p) -> node_status_pb2.GpuState:
        """Reads one GPU.

        Raises:
            NvmlError: the memory cannot be read. Other numbers that cannot be read are absent.
        """
        memory, used = _Memory(), _Utilization()
        power_mw, limit_mw = ctypes.c_uint(), ctypes.c_uint()
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        state = node_status_pb2.GpuState(memory_total_bytes=memory.total, memory_used_bytes=memory.used)
        if self._gives("nvmlDeviceGetName", handle, name, ctypes.c_uint(_NAME_BYTES)):
            state.name = name.value.decode(errors="replace")
        if self._gives("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(used)):
            state.busy_share = min(100, used.gpu) / 100
        if self._gives("nvmlDeviceGetPowerUsage", handle, ctypes.byref(power_mw)):
            state.power_w = power_mw.value / 1e3
        if self._gives("nvmlDeviceGetEnforcedPowerLimit", handle, ctypes.byref(limit_mw)):
            state.power_limit_w = limit_mw.value / 1e3
        return state

    def _gives(self, call: str, *arguments: object) -> bool:
        try:
            self._call(call, *arguments)
        except NvmlError:
            return False
        return True

    def _call(self, call: str, *arguments: object) -> None:
        try:
            code = getattr(self._library, call)(*arguments)
        except AttributeError:
            raise NvmlError(f"this driver has no {call}") from None
        if code:
            raise NvmlError(f"{call} returned {code}")


class GpuMeter:
    """Keeps the last state of some GPUs.

    Args:
        uuids: of the GPUs; none on a CPU.

    Attributes:
        states: the GPUs that could be read, in the order of `uuids`.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        self._uuids = uuids
        self.states: tuple[node_status_pb2.GpuState, ...] = ()

    async def watch(self) -> None:
        """Reads every few seconds until cancelled; returns if there is nothing to read."""
        if not self._uuids:
            return
        try:
            nvml = await asyncio.to_thread(_open)
            handles = [nvml.gpu(uuid) for uuid in self._uuids]
        except NvmlError as error:
            _log.info("memory, use and power of the GPUs are not reported: %s", error)
            return
        while True:
            # In a thread, because a call waits for a driver that resets a GPU.
            self.states = await asyncio.to_thread(_read, nvml, handles)
            await asyncio.sleep(_READ_EVERY_S)


def _open() -> Nvml:
    try:
        return Nvml(ctypes.CDLL(_LIBRARY))
    except OSError as error:
        raise NvmlError(str(error)) from None


def _read(nvml: Nvml, handles: Sequence[ctypes.c_void_p]) -> tuple[node_status_pb2.GpuState, ...]:
    """The state of each GPU that can be read now; a GPU that is being reset cannot."""
    states = []
    for handle in handles:
        with suppress(NvmlError):
            states.append(nvml.state(handle))
    return tuple(states)


def gpu_uuids(settings: NodeSettings) -> list[str]:
    """UUIDs of the GPUs of the node's ranks on this host, in NVML's form; CUDA's numbers may differ from NVML's."""
    devices = [rank_device(settings, rank) for rank in range(settings.ranks_per_host)]
    return [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in devices]
