"""How kernels are launched here: compiled for a GPU, or interpreted on a CPU. Knows no kernel."""

import triton


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1, read by Triton when a kernel is defined).

    Its bf16 products are wrong, so kernels that multiply matrices cast to float32 there.
    """
    return bool(triton.knobs.runtime.interpret)
