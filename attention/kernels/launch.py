"""How kernels are launched here: compiled for a GPU, or interpreted on a CPU. Knows no kernel."""

import torch
import triton
import triton.language as tl

# Gluon, the language of the kernels for Hopper, is experimental; they were measured with these versions of Triton.
_GLUON_VERSIONS = ("3.6.",)


def has_hopper_kernels(device: torch.device) -> bool:
    """Whether the kernels written in Gluon run there. Their modules are imported only then: with another Triton the
    import may fail."""
    return (
        device.type == "cuda"
        and triton.__version__.startswith(_GLUON_VERSIONS)
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


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
