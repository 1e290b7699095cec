"""Divides the memory of one GPU of a node, as `baton.engine.device.profile` does after the largest steps. Pure.

What steps and graphs take was measured on H200s. Llama-3.1-8B's shape logged "weights 15.0 GiB, KV cache 106.5 GiB,
steps 0.9 GiB, graphs 1.4 GiB, staging 2.0 GiB", and each of four ranks of 30 layers of DeepSeek-V3 with attention data
parallelism "weights 79.2 GiB, KV cache 38.4 GiB, steps 3.2 GiB, graphs 3.0 GiB" and the same staging, when graphs had
the activations of a step of 1,024 tokens on each rank; now they have those of 256. Activations grow with a layer's
width, and each of a token's experts has some.
"""

from dataclasses import dataclass

from baton.planner.model_size import ModelSize

GIB = 1 << 30
# Share of the memory that a node uses: `--gpu-memory-fraction`.
_MEMORY_SHARE = 0.9
# A step of 8,192 tokens, for each channel of a token, of models without and with experts.
_STEP_TOKENS, _CHANNEL_BYTES, _EXPERTS_CHANNEL_BYTES = 8192, 29.0, 58.0
# The driver's part of captured graphs, and 512 rows of logits in the model's type and in float32.
_GRAPHS_BYTES, _GRAPH_ROWS, _LOGIT_BYTES, _RANK_TOKENS, _MOST_TOKENS = 1.0 * GIB, 512, 6, 256, 4096
# Two directions of four buffers of `--segment-mib`.
_STAGING_BYTES = 2.0 * GIB


@dataclass(frozen=True)
class RankMemory:
    """The memory of one GPU in bytes.

    Args:
        total: of the GPU.
        kv_cache: with recurrent states; below 0 if the rest does not fit.
    """

    total: float
    weights: float
    kv_cache: float
    steps: float
    graphs: float
    staging: float

    def __str__(self) -> str:
        names = ("weights", "kv_cache", "steps", "graphs", "staging")
        parts = [f"{name.replace('kv_cache', 'KV cache')} {getattr(self, name) / GIB:.1f} GiB" for name in names]
        return f"{', '.join(parts)} of {self.total / GIB:.1f}"


def rank_memory(size: ModelSize, memory_gib: float, ranks: int) -> RankMemory:
    """The parts on each of `ranks` GPUs of `memory_gib`; of each rank's own requests if attention is data parallel."""
    weights = size.rank_bytes(ranks)
    steps = _STEP_TOKENS * (_EXPERTS_CHANNEL_BYTES if size.experts else _CHANNEL_BYTES) * size.hidden_size
    graphs = _GRAPHS_BYTES + _GRAPH_ROWS * _LOGIT_BYTES * size.head / size.hidden_size
    if size.own_requests:
        graphs += steps * min(1.0, ranks * _RANK_TOKENS / _STEP_TOKENS)
    else:
        graphs += max(0.0, steps * _MOST_TOKENS / _STEP_TOKENS - _GRAPHS_BYTES)
    total = memory_gib * GIB
    left = total * _MEMORY_SHARE - weights - steps - graphs - _STAGING_BYTES
    return RankMemory(total, weights, left, steps, graphs, _STAGING_BYTES)
