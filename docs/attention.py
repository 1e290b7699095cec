"""Writes docs/attention.md from the table of attention backends; `make docs` calls it."""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from attention.backend import AttentionFeature, BackendCapabilities
from attention.selection import BACKENDS
from baton.kvcache.spec import FP8_DTYPES

# vLLM's names, where they differ from the names here.
NAMES = (
    ("get_attn_backend", "attention.selection.select_backend"),
    ("UBatchSlice", "attention.micro_batches.MicroBatch"),
    ("AttentionImpl", "attention.backend.AttentionBackend"),
    ("accept_output_buffer", "attention.layer.Attention.forward"),
    ("output_scale", "attention.layer.Attention.forward"),
    ("_prob_scale", "baton.kvcache.scales.KVScales"),
    ("supports_quant_query_input", "attention.backend.AttentionFeature.QUANTIZED_QUERY"),
    ("use_sparse", "attention.backend.AttentionFeature.SPARSE"),
    ("per_layer_sliding_window", "attention.parameters.AttentionParameters"),
    ("kv_sharing_target_layer_name", "attention.layer.Attention"),
    ("get_kv_cache_shape", "baton.kvcache.cache.PagedKVCache"),
    ("get_kv_cache_stride_order", "baton.kvcache.layout.KVCacheLayout.memory_order"),
    ("LocalStridedBlockSparseAttn", "attention.kernels.blocksparse.prefill.blocksparse_prefill"),
    ("full_cudagraph_supported", "attention.backend.BackendCapabilities"),
    ("kv_cache_spec", "attention.backend.AttentionNeeds"),
    ("q_range", "baton.kvcache.scales.Q_SCALE_CONSTANT"),
    ("k_range", "baton.kvcache.scales.K_SCALE_CONSTANT"),
    ("v_range", "baton.kvcache.scales.V_SCALE_CONSTANT"),
    ("PagedAttention.forward_decode", "attention.kernels.blocksparse.decode.blocksparse_decode"),
    ("MLACommonImpl", "attention.mla.MLAAttention"),
    ("MLACommonMetadata", "attention.backend.MLAMetadata"),
    ("context_chunk_workspace", "attention.backend.MLABackend"),
    (
        "AttentionState.graph_capture",
        "attention.metadata_builder.AttentionMetadataBuilder.build_for_cudagraph_capture",
    ),
)

# Parts of vLLM's interface that have no counterpart, and why.
LEFT_OUT = (
    (
        "`output_shape`",
        "The result has the queries' shape. Latent attention, whose values are narrower than its queries, has a layer "
        "of its own, `attention.mla.MLAAttention`.",
    ),
    (
        "`output_block_scale`",
        "It is for output in block-scaled 4-bit (NVFP4). Layers here take 8 or 16 bits, for which `output_scale` is "
        "enough. vLLM's xformers backend refuses both.",
    ),
    (
        "`Q_SCALE_CONSTANT`, `K_SCALE_CONSTANT` and `V_SCALE_CONSTANT` in the environment",
        "They are constants: nodes with different values would compute different scales for the same KV.",
    ),
    (
        "`full_cudagraph_supported` and `kv_cache_spec` of builders",
        "Backends are selected by both before a builder exists: `BackendCapabilities.cudagraph` and `AttentionNeeds` "
        "have them.",
    ),
)

# Public, tested, and called by nothing in Baton's nodes: what each is for.
LIBRARY_API = (
    (
        "attention.metadata.build_common_metadata",
        "Builds a batch's metadata from lists; nodes copy theirs together with other arrays.",
    ),
    ("attention.metadata.common_prefix_len", "Number of leading tokens of a batch that lie in the same blocks."),
    (
        "attention.metadata_builder.AttentionMetadataBuilder.use_cascade_attention",
        "Whether `build` should get that length, so that all requests attend to the shared prefix at once.",
    ),
    (
        "attention.metadata_builder.AttentionMetadataBuilder.reorder_batch",
        "Puts decodes first by swapping rows; the scheduler's batches already have that order.",
    ),
    ("attention.advance.advance_step", "Computes the next decode step's metadata from this one's, on the device."),
    (
        "attention.local.local_attention_metadata",
        "Chunked local attention as virtual requests, for backends that are only causal.",
    ),
    (
        "attention.parameters.AttentionType.ENCODER",
        "Encoder and encoder-decoder attention, by `Attention(attn_type=...)`.",
    ),
    (
        "attention.micro_batches.split_attn_metadata",
        "Splits a batch's metadata into that of micro-batches, which may begin and end within requests.",
    ),
    (
        "attention.micro_batches.make_kv_sharing_fast_prefill_common_attn_metadata",
        "For layers that share KV: makes queries only of tokens whose logits are needed.",
    ),
    ("attention.selection.selection_report", "Lists each backend's reasons as text, without creating a backend."),
    ("attention.selection.fitting_backends", "All backends that meet the needs; the benchmarks compare them."),
    ("baton.kvcache.block_ops.copy_blocks", "Copies whole blocks within a cache."),
    ("baton.kvcache.block_ops.swap_blocks", "Copies whole blocks between a GPU's cache and a host's."),
    ("baton.kvcache.block_ops.convert_kv", "Converts a layer to another dtype, fp8 included."),
    ("baton.kvcache.layout.LayoutChoice.set_kv_cache_layout", "Overrides the layout from the program."),
)

PAGE = Path(__file__).resolve().parent / "attention.md"

_INTRODUCTION = """# Attention backends

A node uses the first backend in this table that supports its model on its machine, and logs why it did not use the
others. On Hopper GPUs, TRITON_MLA is preferred to FLASHINFER_MLA for models with at most 32 heads.

`--attention-backend` (`BATON_ATTENTION_BACKEND`) forces a backend. If it does not support the model, the node prints
the reasons and does not start. If its package is missing, the error has the command that installs it:

- FLASHINFER, FLASHINFER_MLA and XFORMERS: `pip install 'baton-serving[attention]'`
- FLASH_ATTN: `pip install --no-build-isolation 'baton-serving[flash-attn]'`, which compiles it for the installed torch

With `--constraint constraints-attention.txt` from the repository, both commands install versions that work together.

`attention/parameters.py` defines the features, and `baton/kvcache/layout.py` the layouts. One conformance suite
(`tests/conformance/attention`) compares all backends with a float64 reference. `make test` runs it for plain torch
and Triton's interpreter on a CPU, `make test-gpu` for all backends that are installed on a GPU machine. Results on a
GPU are in [attention_conformance.md](../bench/results/attention_conformance.md), and benchmarks against other
libraries' kernels in [attention.md](../bench/results/attention.md). [Adding an attention
backend](adding-a-backend.md) has a complete example.

![Speed of Baton's kernels relative to other libraries'](../bench/results/attention.svg)
"""


def page() -> str:
    """The page's text."""
    capabilities = [backend.capabilities for backend in BACKENDS]
    sections = [_INTRODUCTION, "## Machines and sizes", "", *_sizes(capabilities), "", "## Features", ""]
    sections += [*_features(capabilities), "", "## Library API", "", *_library_api(), "", "## Names", "", *_names()]
    sections += ["", "## Left out", "", *_left_out()]
    return "\n".join(sections) + "\n"


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


def _library_api() -> list[str]:
    sentence = "Baton's nodes do not use these functions. They are for programs that use the packages as a library:"
    return [
        sentence,
        "",
        "| name | purpose |",
        "|---|---|",
        *(f"| `{name}` | {purpose} |" for name, purpose in LIBRARY_API),
    ]


def _names() -> list[str]:
    sentence = "Classes and functions have the same names as in vLLM, except these:"
    return [sentence, "", "| in vLLM | here |", "|---|---|", *(f"| `{theirs}` | `{ours}` |" for theirs, ours in NAMES)]


def _left_out() -> list[str]:
    return ["| in vLLM | why not here |", "|---|---|", *(f"| {what} | {why} |" for what, why in LEFT_OUT)]


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
