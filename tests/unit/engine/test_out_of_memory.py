"""Out-of-memory errors are recognized by torch's class, or by their text where there is no class."""

import pytest
import torch

from baton.engine.device.out_of_memory import allocating, describe_out_of_memory

TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 14.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 3.20 GiB is "
    "free. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 1.00 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True "
    "to avoid fragmentation."
)


def described(error: Exception) -> str:
    line = describe_out_of_memory(error)
    assert line is not None
    assert "\n" not in line
    return line


def test_a_gpu_error_has_figures_and_cures_and_no_advice_about_the_allocator() -> None:
    line = described(torch.OutOfMemoryError(TORCH_SAYS))
    assert "Tried to allocate 14.00 GiB" in line
    assert "3.20 GiB is free" in line
    for cure in ("--gpu-memory-fraction", "--kv-cache-mib", "--max-batch-tokens", "--tensor-parallel-size"):
        assert cure in line
    # Expandable segments cannot be shared with other processes, so cuda_ipc would be lost.
    assert "expandable_segments" not in line


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    ],
)
def test_errors_of_drivers_and_libraries_are_recognized(message: str) -> None:
    line = described(RuntimeError(message))
    assert message.partition("\n")[0] in line
    assert "--gpu-memory-fraction" in line


def test_a_host_error_states_requested_and_free_memory_in_gib() -> None:
    with pytest.raises(RuntimeError) as raised, allocating("the KV cache"):
        torch.zeros(1 << 50, dtype=torch.uint8)
    line = described(raised.value)
    assert line.startswith("no memory is left for the KV cache: 1048576.0 GiB were asked for, ")
    assert float(line.partition("asked for, ")[2].partition(" GiB are free")[0]) > 0
    assert "--kv-cache-mib" in line
    assert "--gpu-memory-fraction" not in line


def test_a_memory_error_of_python_is_recognized() -> None:
    with pytest.raises(MemoryError) as raised:
        bytearray(1 << 60)
    assert describe_out_of_memory(raised.value) is not None


def test_only_the_innermost_purpose_is_stated() -> None:
    with pytest.raises(MemoryError) as raised, allocating("the node"), allocating("the weights"):
        raise MemoryError
    line = described(raised.value)
    assert "for the weights" in line
    assert "the node" not in line


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("out of memory"), OSError(12, "no")])
def test_other_errors_are_left_alone(error: Exception) -> None:
    assert describe_out_of_memory(error) is None
    with pytest.raises(type(error)) as raised, allocating("the weights"):
        raise error
    assert not hasattr(raised.value, "__notes__")
