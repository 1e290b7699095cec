"""A pytest plugin that compiles kernels for a GPU, on a machine without one, instead of interpreting them.

The interpreter accepts programs that the compiler refuses. `make test-compiled` runs it.

A test fails if a kernel that it launches does not compile, or if a loop of it does not carry a name that it assigns.
Nothing is computed, so what else it says does not count.
"""

import os
from collections.abc import Generator
from contextlib import suppress
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before any kernel is imported

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.code_generator import CodeGenerator, flatten_values_to_ir
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# An H200's.
_TARGET = GPUTarget("cuda", 90, 32)
_refused: list[str] = []
_run = JITFunction.run
_verify = CodeGenerator._verify_loop_carried_variable


class _NoGpu:
    """What the compiler asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return _TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None) -> int:
        del device
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _compile(kernel: JITFunction, *args: Any, **options: Any) -> Any:
    try:
        return _run(kernel, *args, **{**options, "warmup": True})
    except Exception as error:
        _refused.append(f"{kernel.fn.__module__}.{kernel.fn.__name__}: {error}")
        raise


def _verify_carried(generator: CodeGenerator, name: str, after: Any, before: Any) -> None:
    """Refuses a name that has the same value before a loop and after a trial of its body, although the body assigns it.

    The compiler then carries it through no round. If it takes over another name's value, and began as that value, each
    round should see the other name's value of the round before, as it does in the interpreter.
    """
    _verify(generator, name, after, before)
    if name in generator.local_defs and flatten_values_to_ir([after]) == flatten_values_to_ir([before]):
        raise ValueError(f"a loop does not carry {name!r}: begin with a new value, such as `{name} = other + 0`")


def pytest_configure() -> None:
    driver.set_active(_NoGpu())
    JITFunction.run = _compile
    CodeGenerator._verify_loop_carried_variable = _verify_carried
    assert not triton.knobs.runtime.interpret


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    _refused.clear()
    with suppress(Exception):  # of numbers that nobody has computed
        yield
    assert not _refused, "\n".join(_refused)
