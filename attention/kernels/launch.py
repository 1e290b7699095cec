"""How kernels are launched here: compiled for a GPU, or interpreted on a CPU. Knows no kernel."""

import triton
import triton.language as tl


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1, read by Triton when a kernel is defined).

    Its bf16 products are wrong, so kernels that multiply matrices cast to float32 there.
    """
    return bool(triton.knobs.runtime.interpret)


@triton.jit
def bound(number, INTERPRETED: tl.constexpr):
    """For a loop's `range`: the interpreter's numbers are arrays of one element, which Python does not count with."""
    if INTERPRETED:
        return number.handle.data.item()
    return number
