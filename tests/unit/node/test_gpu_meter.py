"""What a node reports of its GPUs, with a library that has NVML's calls."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from baton.node.gpu_meter import GpuMeter, Nvml, NvmlError
from baton.protos.v1 import node_status_pb2

NOT_SUPPORTED, NOT_FOUND = 3, 6
UUID = "GPU-8a4f1d2e-0000-0000-0000-000000000001"


class Driver:
    """NVML's calls with its types: each fills in what a pointer refers to and returns a code.

    Args:
        lacks: calls that return NOT_SUPPORTED.
    """

    def __init__(self, *lacks: str) -> None:
        for name, call in self._calls().items():
            setattr(self, name, (lambda *_: NOT_SUPPORTED) if name in lacks else call)

    def _calls(self) -> dict[str, Callable[..., int]]:
        return {
            "nvmlInit_v2": lambda: 0,
            "nvmlDeviceGetHandleByUUID": self._handle,
            "nvmlDeviceGetName": self._name,
            "nvmlDeviceGetMemoryInfo": lambda handle, memory: self._fill(
                handle, memory, total=80 * 2**30, free=30 * 2**30, used=50 * 2**30
            ),
            "nvmlDeviceGetUtilizationRates": lambda handle, used: self._fill(handle, used, gpu=67, memory=12),
            "nvmlDeviceGetPowerUsage": lambda handle, power: self._fill(handle, power, value=310_500),
            "nvmlDeviceGetEnforcedPowerLimit": lambda handle, power: self._fill(handle, power, value=700_000),
        }

    def _handle(self, uuid: bytes, handle: Any) -> int:
        if uuid.decode() != UUID:
            return NOT_FOUND
        handle._obj.value = 7
        return 0

    def _name(self, handle: ctypes.c_void_p, name: Any, _: ctypes.c_uint) -> int:
        name.value = b"NVIDIA H100 80GB HBM3"
        return 0

    def _fill(self, handle: ctypes.c_void_p, pointer: Any, **values: int) -> int:
        assert handle.value == 7
        for name, value in values.items():
            setattr(pointer._obj, name, value)
        return 0


def read(driver: Driver) -> node_status_pb2.GpuState:
    nvml = Nvml(driver)
    return nvml.state(nvml.gpu(UUID))


def test_memory_use_and_power_have_their_units() -> None:
    assert read(Driver()) == node_status_pb2.GpuState(
        name="NVIDIA H100 80GB HBM3",
        memory_total_bytes=80 * 2**30,
        memory_used_bytes=50 * 2**30,
        busy_share=0.67,
        power_w=310.5,
        power_limit_w=700.0,
    )


def test_a_number_that_the_driver_does_not_give_is_absent_and_the_rest_is_there() -> None:
    state = read(Driver("nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates"))
    assert not state.HasField("power_w")
    assert not state.HasField("busy_share")
    assert (state.power_limit_w, state.memory_used_bytes) == (700.0, 50 * 2**30)


def test_a_gpu_whose_memory_cannot_be_read_is_an_error() -> None:
    with pytest.raises(NvmlError, match="nvmlDeviceGetMemoryInfo returned 3"):
        read(Driver("nvmlDeviceGetMemoryInfo"))


def test_an_unknown_gpu_and_a_missing_call_are_errors() -> None:
    with pytest.raises(NvmlError, match="nvmlDeviceGetHandleByUUID returned 6"):
        Nvml(Driver()).gpu("GPU-of-another-machine")
    with pytest.raises(NvmlError, match="has no nvmlInit_v2"):
        Nvml(object())


@pytest.mark.parametrize("uuids", [[], ["GPU-of-another-machine"]])
async def test_a_node_without_gpus_or_without_the_library_reports_none_and_stops_reading(uuids: list[str]) -> None:
    meter = GpuMeter(uuids)
    await meter.watch()
    assert meter.states == ()
