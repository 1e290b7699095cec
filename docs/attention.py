"""Writes docs/attention.md from the table of attention backends; `make docs` calls it."""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from attention.backend import AttentionFeature, BackendCapabilities
from attention.selection import BACKENDS
from kvcache.spec import FP8_DTYPES

# What vLLM calls a thing, where its name is another, and what it is here.
NAMES = (
    ("get_attn_backend", "attention.selection.select_backend"),
    ("AttentionImpl", "attention.backend.AttentionBackend"),
    ("accept_output_buffer", "attention.layer.Attention.forward"),
    ("supports_quant_query_input", "attention.backend.AttentionFeature.QUANTIZED_QUERY"),
    ("per_layer_sliding_window", "attention.parameters.AttentionParameters"),
    ("kv_sharing_target_layer_name", "attention.layer.Attention"),
    ("get_kv_cache_shape", "kvcache.cache.PagedKVCache"),
    ("get_kv_cache_stride_order", "kvcache.layout.KVCacheLayout.memory_order"),
    ("LocalStridedBlockSparseAttn", "attention.kernels.blocksparse.prefill.blocksparse_prefill"),
    ("PagedAttention.forward_decode", "attention.kernels.blocksparse.decode.blocksparse_decode"),
    ("MLACommonImpl", "attention.mla.MLAAttention"),
    ("MLACommonMetadata", "attention.backend.MLAMetadata"),
    ("context_chunk_workspace", "attention.backend.MLABackend"),
    (
        "AttentionState.graph_capture",
        "attention.metadata_builder.AttentionMetadataBuilder.build_for_cudagraph_capture",
    ),
)

PAGE = Path(__file__).resolve().parent / "attention.md"

_INTRODUCTION = """# Attention backends

A node takes the first backend of this table that serves its model on its machine, and logs every other one with its
reasons; on a Hopper GPU TRITON_MLA goes before FLASHINFER_MLA for at most 32 heads. `BATON_ATTENTION_BACKEND`
(`--attention-backend`) forces one; if that one cannot serve, the node says why and does not start. A backend whose
package is missing is refused with the command that installs it.

What the words mean: `attention/parameters.py` defines each feature, `kvcache/layout.py` the layouts. One
conformance suite (`tests/conformance/attention`) compares the backends with attention by its definition in float64:
plain torch and Triton's interpreter on a CPU with `make test`, all of a machine's on a GPU with `make test-gpu`.
How fast each one is beside its rivals is in [attention.md](../bench/results/attention.md), and what the conformance
suite said of all of them on a GPU in [attention_conformance.md](../bench/results/attention_conformance.md).

![Share of each rival that Baton's kernels reach](../bench/results/attention.svg)
"""


def page() -> str:
    """The page's text."""
    capabilities = [backend.capabilities for backend in BACKENDS]
    sections = [_INTRODUCTION, "## Machines and sizes", "", *_sizes(capabilities), "", "## Features", ""]
    return "\n".join([*sections, *_features(capabilities), "", "## Names", "", *_names()]) + "\n"


def _sizes(capabilities: list[BackendCapabilities]) -> list[str]:
    rows = ["| backend | cache | runs on | dtypes | head sizes | block sizes | layouts | needs |", "|---" * 8 + "|"]
    for backend in capabilities:
        cells = (
            backend.name,
            str(backend.kind),
            _named(backend.devices),
            _named(backend.dtypes),
            _sizes_of(backend.head_sizes),
            _sizes_of(backend.block_sizes),
            _named(layout.name for layout in backend.layouts),
            f"`{backend.install}`" if backend.package else "",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _features(capabilities: list[BackendCapabilities]) -> list[str]:
    names = [*(feature.value for feature in AttentionFeature), *FP8_DTYPES, "CUDA graphs", "layers may differ"]
    rows = [f"| backend | {' | '.join(name.replace('_', ' ') for name in names)} |", "|---" * (len(names) + 1) + "|"]
    for backend in capabilities:
        has = [
            *(feature in backend.features for feature in AttentionFeature),
            *(dtype in backend.kv_dtypes for dtype in FP8_DTYPES),
            backend.cudagraph,
            not backend.uniform_layers,
        ]
        rows.append(f"| {backend.name} | {' | '.join('yes' if it else '' for it in has)} |")
    return rows


def _names() -> list[str]:
    sentence = "Most things that vLLM has too bear its names; these bear others:"
    return [sentence, "", "| in vLLM | here |", "|---|---|", *(f"| `{theirs}` | `{ours}` |" for theirs, ours in NAMES)]


def _named(values: Iterable[object]) -> str:
    return ", ".join(sorted(str(value) for value in values))


def _sizes_of(sizes: frozenset[int] | None) -> str:
    """`32 to 256 in steps of 8` rather than thirty numbers."""
    if sizes is None:
        return "any"
    ordered = sorted(sizes)
    steps = {after - before for before, after in pairwise(ordered)}
    if len(ordered) > 4 and len(steps) == 1:
        return f"{ordered[0]} to {ordered[-1]} in steps of {steps.pop()}"
    return ", ".join(str(size) for size in ordered)


if __name__ == "__main__":
    PAGE.write_text(page())
