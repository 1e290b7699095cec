"""`make test-compiled` finds what Triton's interpreter accepts and its compiler refuses or takes for something else."""

import os
import subprocess
import sys
from pathlib import Path

# In the second kernel, a shape is not known when it is compiled. In the third one, `before` would stay 1.
_TESTS = """
from typing import NamedTuple
import torch, triton
import triton.language as tl

class Sizes(NamedTuple):
    rows: int

@triton.jit
def zeros(out_ptr, ROWS: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, ROWS), tl.zeros([ROWS], tl.float32))

@triton.jit
def zeros_of(out_ptr, sizes: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, sizes.rows), tl.zeros([sizes.rows], tl.float32))

@triton.jit
def numbers_before(out_ptr):
    number = tl.load(out_ptr)
    before = number
    while number < 4:
        tl.store(out_ptr + number, before)
        before, number = number, number + 1

def test_first():
    out = torch.ones(16)
    zeros[(1,)](out, ROWS=16)
    assert not out.any()

def test_second():
    out = torch.ones(16)
    zeros_of[(1,)](out, sizes=Sizes(16))
    assert not out.any()

def test_third():
    out = torch.ones(16, dtype=torch.int32)
    numbers_before[(1,)](out)
    assert out[:4].tolist() == [1, 1, 1, 2]
"""


def test_kernels_that_only_the_interpreter_runs_as_written_are_found(tmp_path: Path) -> None:
    (tmp_path / "test_kernels.py").write_text(_TESTS)
    root = Path(__file__).parents[3]
    outcomes = {}
    for name, plugin in (("interpreted", ()), ("compiled", ("-p", "tests.compile_only"))):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        environment |= {"PYTHONPATH": str(root), "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *plugin, str(tmp_path)]
        told = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        ).stdout
        outcomes[name] = [line.split()[0] for line in told.splitlines() if line.startswith(("PASSED", "FAILED"))]
    assert outcomes == {"interpreted": ["PASSED"] * 3, "compiled": ["PASSED", "FAILED", "FAILED"]}, told
