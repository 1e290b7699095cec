"""Which combinations run. BATON_TEST_FULL=1: all. Otherwise, on a GPU: every setting in every layout and block size in
bfloat16, and in the other dtypes in two layouts and block sizes each, which change from setting to setting. On a CPU:
each setting in each layout, block sizes and dtypes taking turns; in Triton's interpreter, where one batch takes a
second, in two layouts, with half of the batches in each.
"""

import os
from collections.abc import Iterator
from itertools import product

from attention.selection import BackendClass
from baton.kvcache.layout import KVCacheLayout
from tests.conformance.attention.batches import batches
from tests.conformance.attention.platform_backends import dtypes_here
from tests.conformance.attention.settings import SETTINGS, Setting
from tests.device import DEVICE

FULL = bool(os.environ.get("BATON_TEST_FULL"))
BLOCK_SIZES = (16, 32, 64, 128, 256)


def settings_of(backend: BackendClass) -> tuple[Setting, ...]:
    capabilities = backend.capabilities
    return tuple(
        setting
        for setting in SETTINGS
        if setting.features <= capabilities.features
        and (not setting.kv_dtype or setting.kv_dtype in capabilities.kv_dtypes)
    )


def block_sizes_of(backend: BackendClass) -> tuple[int, ...]:
    """Block sizes of a backend; 256 only if it reads nothing smaller."""
    known = backend.capabilities.block_sizes
    small = tuple(size for size in BLOCK_SIZES[:-1] if known is None or size in known)
    return small or tuple(size for size in BLOCK_SIZES if known is None or size in known)


def interpreted(backend: BackendClass) -> bool:
    return DEVICE == "cpu" and "cpu" not in backend.capabilities.devices


def batches_of(backend: BackendClass, block_size: int, place: int) -> dict[str, list[tuple[int, int]]]:
    """The dtype names. `place`: any number that changes from combination to combination."""
    everything = batches(block_size)
    if not interpreted(backend):
        return dict(everything)
    return {name: sizes for index, (name, sizes) in enumerate(everything.items()) if index % 2 == place % 2}


def combinations(backend: BackendClass) -> Iterator[tuple[Setting, KVCacheLayout, int, str]]:
    """(setting, layout, block size, dtype)."""
    layouts = sorted(backend.capabilities.layouts, key=lambda layout: layout.name)
    sizes, dtypes = block_sizes_of(backend), dtypes_here(backend.capabilities)
    in_full = () if DEVICE == "cpu" and not FULL else dtypes if FULL else ("bfloat16",)
    # Settings last: what runs at the same time compiles different kernels.
    for layout, size, dtype, setting in product(layouts, sizes, in_full, settings_of(backend)):
        yield setting, layout, size, dtype
    if in_full == dtypes:
        return
    others = [dtype for dtype in dtypes if dtype not in in_full]
    for index, setting in enumerate(settings_of(backend)):
        for turn in range(2 if in_full or interpreted(backend) else len(layouts)):
            layout = layouts[(index + turn) % len(layouts)]
            size = sizes[(index // 2) % 2 if interpreted(backend) else (index // len(layouts) + turn) % len(sizes)]
            yield setting, layout, size, others[(index + (2 - bool(in_full)) * turn) % len(others)]


def latent_combinations(backend: BackendClass) -> Iterator[tuple[KVCacheLayout, int, str]]:
    """(layout, block size, dtype)."""
    layouts = sorted(backend.capabilities.layouts, key=lambda layout: layout.name)
    everything = product(layouts, block_sizes_of(backend), dtypes_here(backend.capabilities))
    for index, combination in enumerate(everything):
        if FULL or not interpreted(backend) or (combination[1] < 64 and index % 2 == 0):
            yield combination
