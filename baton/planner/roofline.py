"""Estimates the step costs of a model on a GPU by a roofline, with efficiencies that were measured on an H200.

    dense(tokens) = sqrt(reading² + computing²) + layers * overhead + reductions between ranks

`bench/results/engine.md` has the measurements; `tests/unit/planner/test_roofline.py` compares.
"""

from dataclasses import dataclass
from math import sqrt
from types import MappingProxyType

from baton.core.costs import StepCosts
from baton.core.errors import ConfigError
from baton.planner.memory import rank_memory
from baton.planner.model_size import ModelSize

# Measured shares of an H200's data sheet: reads of weights and KV; products in bf16, fp8, of experts, of attention.
_READ_SHARE, _KV_SHARE = 0.95, 0.95
_PRODUCT_SHARE, _FP8_SHARE, _EXPERTS_SHARE, _PAIR_SHARE = 0.62, 0.46, 0.43, 0.63
_LAYER_S, _FP8_LAYER_S = 34e-6, 46e-6
_STEP_S = 0.1e-3
_REDUCTION_S = 12e-6  # of one reduction between the ranks, two for each layer
_REDUCTION_SHARE = 0.5  # of the link's speed
_TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TYPICAL_CONTEXT = 2048
SEATS = 512  # requests of a step
# Recurrent states: their largest share of the cache, and their number if that suffices (`baton.engine.cache_size`).
_STATE_SHARE, _SLOTS_PER_SEAT = 0.5, 3
LEAST_SLOTS = 2


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet: dense bf16 and fp8 operations without sparsity; `link_gb_per_s` is the speed of one
    GPU to its peers, in one direction. The memory is what the driver shows."""

    name: str
    memory_gib: float
    gb_per_s: float
    tflops: float
    fp8_tflops: float
    link_gb_per_s: float


GPUS = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            Gpu("a10g", 22.5, 600, 70, 70, 16),
            Gpu("a100", 80, 2039, 312, 312, 300),
            Gpu("a100-40", 40, 1555, 312, 312, 300),
            Gpu("b200", 179.1, 7700, 2250, 4500, 900),
            Gpu("h100", 79.6, 3350, 989, 1979, 450),
            Gpu("h20", 95.6, 4000, 148, 296, 450),
            Gpu("h200", 140.4, 4800, 989, 1979, 450),
            Gpu("l4", 22.5, 300, 121, 242, 16),
            Gpu("l40s", 45, 864, 362, 733, 32),
            Gpu("rtx4090", 24, 1008, 165, 330, 16),
        )
    }
)


def gpu_of(name: str) -> Gpu:
    """The GPU of this name.

    Raises:
        ConfigError: the GPU is not in the table.
    """
    gpu = GPUS.get(name.lower().replace("_", "-"))
    if gpu is None:
        raise ConfigError(
            f"the GPU {name!r} is not known", field="gpu", value=name, allowed=tuple(GPUS),
            cure="name the most similar one, or give measured costs by --costs-from or --costs",
        )  # fmt: skip
    return gpu


def roofline(size: ModelSize, gpu: Gpu, ranks: int = 1) -> StepCosts:
    """The costs of one node of `ranks` GPUs."""
    peak, product_share, layer_s = gpu.tflops * 1e12, _PRODUCT_SHARE, _LAYER_S
    if size.linear_bytes == 1:
        peak, product_share, layer_s = gpu.fp8_tflops * 1e12, _FP8_SHARE, _FP8_LAYER_S
    experts_share = product_share * _EXPERTS_SHARE / _PRODUCT_SHARE
    points = []
    for tokens in _TOKENS:
        reading_s = size.rank_read_bytes(tokens, ranks) / (gpu.gb_per_s * 1e9 * _READ_SHARE)
        # Decoding rows need the head, and steps of more than a few hundred tokens hold prompts.
        computing_s = (
            size.dense_flops(tokens, heads=min(tokens, 256)) / product_share + size.expert_flops(tokens) / experts_share
        )
        computing_s /= ranks * peak
        seconds = sqrt(reading_s**2 + computing_s**2) + size.num_layers * layer_s + _STEP_S
        if ranks > 1:
            # With attention data parallelism, one gathering and one scattering sum in place of two sums.
            moved = (1 if size.own_requests else 2) * (ranks - 1) / ranks * tokens * size.hidden_size * size.head_bytes
            link = gpu.link_gb_per_s * 1e9 * _REDUCTION_SHARE
            seconds += 2 * size.num_layers * (_REDUCTION_S + moved / link)
        points.append((tokens, seconds))
    # Layers with a window read and compute little beyond it.
    full = 1 - size.windowed_share * max(0.0, 1 - size.window / _TYPICAL_CONTEXT) if size.window else 1.0
    bytes_per_s = gpu.gb_per_s * 1e9 * _KV_SHARE
    return StepCosts(
        tuple(points),
        key_s=full * size.kv_bytes / kv_holders(size, ranks) / bytes_per_s,
        pair_s=full * size.pair_flops / ranks / (gpu.tflops * 1e12 * _PAIR_SHARE),
        decode_row_s=2 * _rank_state_bytes(size, ranks) / bytes_per_s,  # each step reads a row's state and writes it
    )


def cache_tokens(size: ModelSize, gpu: Gpu, ranks: int) -> int:
    """Tokens of KV that fit next to weights and states on each of `ranks` GPUs; at most 0 if the weights do not fit."""
    states = state_slots(size, gpu, ranks) * _rank_state_bytes(size, ranks)
    return int((_room_bytes(size, gpu, ranks) - states) / (size.cached_bytes / kv_holders(size, ranks)))


def state_slots(size: ModelSize, gpu: Gpu, ranks: int) -> int:
    """Recurrent states that fit next to the weights, as a node chooses their number; 0 if none fits or exists."""
    if not size.state_bytes:
        return 0
    fitting = int(_STATE_SHARE * _room_bytes(size, gpu, ranks) / _rank_state_bytes(size, ranks))
    return max(0, min(fitting, _SLOTS_PER_SEAT * SEATS))


def _room_bytes(size: ModelSize, gpu: Gpu, ranks: int) -> float:
    """Memory of each GPU that the weights leave."""
    return rank_memory(size, gpu.memory_gib, ranks).kv_cache


def _rank_state_bytes(size: ModelSize, ranks: int) -> float:
    return size.state_bytes / min(ranks, size.state_heads)


def kv_holders(size: ModelSize, ranks: int) -> int:
    """Number of ranks that hold different KV."""
    return ranks if size.own_requests else min(ranks, size.kv_heads)
