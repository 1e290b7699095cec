"""How a node process ends when it cannot come up: one line, and exit code 2."""

import signal

import pytest
import torch

from baton.config import DecodeSettings
from node import process
from protos import common_pb2

TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 14.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 3.20 GiB is "
    "free. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 1.00 MiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True "
    "to avoid fragmentation."
)


def test_a_full_gpu_is_one_line_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object) -> None:
        raise torch.OutOfMemoryError(TORCH_SAYS)

    monkeypatch.setattr(process, "load", load)
    monkeypatch.setattr(process, "set_up_logging", lambda *_: None)
    settings = DecodeSettings.model_validate({})
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            process.run_node("decode_node", settings, common_pb2.ROLE_DECODE, lambda *_: pytest.fail("it came up"))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Tried to allocate 14.00 GiB" in line
    assert "--gpu-memory-fraction" in line
    # Memory that can grow cannot be given to other processes: cuda_ipc would be lost.
    assert "expandable_segments" not in line
