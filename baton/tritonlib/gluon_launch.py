"""Does for kernels in Gluon what `baton.tritonlib.launch` does for Triton's. With another Triton the import may fail:
import it only where kernels for Hopper run.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Waits for all threads of the program, or of its partition where warps are specialised. Triton 3.7 has another name.
await_warps = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def start_dependents(OVERLAP: gl.constexpr):
    """Lets the next kernel start; see `baton.tritonlib.launch.start_dependents`."""
    if OVERLAP:
        _do("griddepcontrol.launch_dependents; // $0")


@gluon.jit
def await_predecessors(OVERLAP: gl.constexpr):
    """Waits for the kernels before; see `baton.tritonlib.launch.await_predecessors`."""
    if OVERLAP:
        _do("griddepcontrol.wait; // $0")


@gluon.jit
def _do(INSTRUCTION: gl.constexpr):
    gl.inline_asm_elementwise(INSTRUCTION, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
