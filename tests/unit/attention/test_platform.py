"""The facts that a node detects about its machine."""

import importlib.util
import sys

import pytest
import torch

from attention.platform import OPTIONAL_PACKAGES, probe_platform
from tests.device import DEVICE


def test_a_cpu_has_no_compute_capability_even_next_to_a_gpu() -> None:
    platform = probe_platform("cpu")
    assert (platform.device_type, platform.compute_capability, platform.num_sms) == ("cpu", None, 1)


def test_packages_are_those_that_python_finds_and_none_is_imported() -> None:
    before = set(sys.modules)
    installed = {name for name in OPTIONAL_PACKAGES if importlib.util.find_spec(name) is not None}
    assert probe_platform("cpu").packages == installed
    assert not (set(sys.modules) - before) & set(OPTIONAL_PACKAGES)


def test_the_interpreter_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert probe_platform("cpu").triton_interpreted
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not probe_platform("cpu").triton_interpreted


@pytest.mark.gpu
def test_a_gpu_reports_its_name_and_capability() -> None:
    platform = probe_platform(DEVICE)
    assert platform.device_type == "cuda"
    assert platform.compute_capability == torch.cuda.get_device_capability()
    assert platform.num_sms == torch.cuda.get_device_properties(0).multi_processor_count
