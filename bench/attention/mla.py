"""Decodes over a latent cache, 512 + 64 channels, and prefills of decompressed heads, 192/128 channels, by every
backend that serves them, and prefills by torch with cuDNN."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from attention.backend import AttentionNeeds, MLABackend, MLADims
from attention.parameters import AttentionParameters
from attention.platform import Platform
from attention.selection import BACKENDS, BackendClass, fitting_backends, reasons_against
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheSpec, KVKind
from bench.attention.batches import Lengths, attend, checked_rows, keys_of, make_cache, make_common
from bench.attention.figures import MAX_ERROR, Goal, Work, default_row, rows_of
from bench.attention.gqa import DEFAULT_SHARE
from bench.attention.measure import Ceilings, microseconds, relative_error, turns
from bench.attention.rivals import CUDNN, FLASHINFER_RAGGED, cudnn_us, flashinfer_prefill
from bench.table import Row

DIMS = MLADims(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512)
KEY_DIM = DIMS.qk_nope_head_dim + DIMS.qk_rope_head_dim
LATENT_DIM = DIMS.kv_lora_rank + DIMS.qk_rope_head_dim
SCALE = KEY_DIM**-0.5
LAYER = AttentionParameters(scale=SCALE)
OURS, RIVAL = "TRITON_MLA", "FLASHINFER_MLA"
BLOCK_SIZE = 64

DECODES = (
    (16, Lengths(1, 1, 1023)),
    (16, Lengths(32, 1, 1023)),
    (16, Lengths(128, 1, 4095)),
    (16, Lengths(32, 1, 32767)),
    (64, Lengths(64, 1, 4095)),
    (128, Lengths(128, 1, 4095)),
    (128, Lengths(32, 1, 8191)),
    (128, Lengths(1, 1, 65535)),
)
PREFILLS = ((16, Lengths(2, 8192, 0)), (128, Lengths(2, 8192, 0)), (16, Lengths(8, 2048, 0)))


def run(platform: Platform, machine: Ceilings, progress: Callable[[str], None]) -> Iterator[Row]:
    for num_heads, lengths in (*DECODES, *PREFILLS):
        work = work_of(num_heads, lengths)
        progress(f"attention: {work.name}, {work.size}")
        needs = needs_of(num_heads, lengths)
        us_of = measure(needs, lengths, platform, progress)
        others = measure_others(num_heads, lengths, platform)
        yield from rows_of(work, us_of | others, OURS, goals_of(num_heads, lengths), machine)
        yield default_row(work, us_of, fitting_backends(needs, platform)[0].capabilities.name, DEFAULT_SHARE)


def work_of(num_heads: int, lengths: Lengths) -> Work:
    if lengths.query_len == 1:
        return Work(
            "MLA decode",
            f"H {num_heads}, B {lengths.num_reqs}, context {lengths.seq_len}",
            lengths.num_reqs * (lengths.seq_len * LATENT_DIM + num_heads * (LATENT_DIM + DIMS.kv_lora_rank)) * 2,
            2 * lengths.pairs * num_heads * (LATENT_DIM + DIMS.kv_lora_rank),
        )
    return Work(
        "MLA prefill",
        f"H {num_heads}, {lengths.num_reqs} x {lengths.query_len}",
        lengths.num_tokens * num_heads * 2 * (KEY_DIM + DIMS.v_head_dim) * 2,
        2 * lengths.pairs * num_heads * (KEY_DIM + DIMS.v_head_dim),
    )


def goals_of(num_heads: int, lengths: Lengths) -> tuple[Goal, ...]:
    if lengths.query_len > 1:
        return (Goal(FLASHINFER_RAGGED, 0.75),)
    if num_heads == 128:
        return (Goal(RIVAL, 0.65),)
    return (Goal(RIVAL, 0.9 if lengths.num_reqs >= 32 and lengths.seq_len >= 4096 else 0.8),)


def needs_of(num_heads: int, lengths: Lengths) -> AttentionNeeds:
    return AttentionNeeds(
        kind=KVKind.MLA,
        device="cuda",
        dtype="bfloat16",
        head_size=LATENT_DIM,
        block_size=BLOCK_SIZE,
        layout=KVCacheLayout.LBNC,
        num_heads=num_heads,
        max_num_reqs=lengths.num_reqs,
        max_model_len=lengths.seq_len,
        max_num_tokens=lengths.num_tokens,
        layers={"layer": LAYER},
        mla=DIMS,
    )


def measure(
    needs: AttentionNeeds, lengths: Lengths, platform: Platform, progress: Callable[[str], None]
) -> dict[str, float]:
    """Microseconds by backend. Backends with wrong results are reported and left out."""
    us_of: dict[str, float] = {}
    for backend in BACKENDS:
        name = backend.capabilities.name
        if reasons_against(backend.capabilities, needs, platform):
            continue
        measured = measure_decode if lengths.query_len == 1 else measure_prefill
        us, error = measured(backend, needs, lengths, platform)
        if error < MAX_ERROR:
            us_of[name] = us
        else:
            progress(f"attention: {name} is wrong by {error:.1e}: {work_of(needs.num_heads, lengths).size}")
    return us_of


def measure_others(num_heads: int, lengths: Lengths, platform: Platform) -> dict[str, float]:
    """Microseconds of kernels that are not backends of ours."""
    if lengths.query_len == 1:
        return {}
    us_of = {
        CUDNN: cudnn_us(
            lengths,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            key_dim=KEY_DIM,
            value_dim=DIMS.v_head_dim,
            scale=SCALE,
        )
    }
    if "flashinfer" in platform.packages:
        call = flashinfer_prefill(*_decompressed(num_heads, lengths), lengths, scale=SCALE)
        us_of[FLASHINFER_RAGGED] = microseconds([call])
    return us_of


def measure_decode(
    backend: BackendClass, needs: AttentionNeeds, lengths: Lengths, platform: Platform
) -> tuple[float, float]:
    """(microseconds of one layer's forward, relative error)."""
    common = make_common(lengths, BLOCK_SIZE)
    layer_bytes = lengths.num_reqs * lengths.seq_len * LATENT_DIM * 2
    spec = KVCacheSpec(KVKind.MLA, turns(layer_bytes), 1, LATENT_DIM, "bfloat16")
    cache = make_cache(spec, lengths, BLOCK_SIZE, KVCacheLayout.LBNC)
    made = backend(needs, platform, context_workspace_tokens=1)
    metadata = made.builder.build_for_cudagraph_capture(common)
    q = torch.randn(lengths.num_reqs, needs.num_heads, LATENT_DIM, dtype=torch.bfloat16, device="cuda")
    out = torch.full_like(q[..., : DIMS.kv_lora_rank], torch.nan, memory_format=torch.contiguous_format)

    def call(layer: int) -> None:
        made.forward(q, None, None, cache.layer(layer), metadata, layer=LAYER, out=out)

    call(0)
    error = 0.0
    for request, rows in checked_rows(lengths):
        latents, _ = keys_of(cache.layer(0), common, request, lengths.seq_len)
        expected = attend(q[rows], latents, latents[..., : DIMS.kv_lora_rank], scale=SCALE)
        error = max(error, relative_error(out[rows], expected))
    return microseconds([partial(call, layer) for layer in range(cache.spec.num_layers)]), error


def measure_prefill(
    backend: BackendClass, needs: AttentionNeeds, lengths: Lengths, platform: Platform
) -> tuple[float, float]:
    """(microseconds of one layer's attention over decompressed keys, relative error)."""
    made = backend(needs, platform, context_workspace_tokens=1)
    assert isinstance(made, MLABackend)
    q, k, v = _decompressed(needs.num_heads, lengths)
    lens = made.builder.build(0, make_common(lengths, BLOCK_SIZE)).prefill
    assert lens is not None

    def call() -> Tensor:
        return made.attend(q, k, v, lens=lens, causal=True, scale=SCALE)[0]

    out = call()
    error = 0.0
    for request, rows in checked_rows(lengths):
        keys = slice(request * lengths.seq_len, (request + 1) * lengths.seq_len)
        error = max(error, relative_error(out[rows], attend(q[rows], k[keys], v[keys], scale=SCALE)))
    return microseconds([call]), error


def _decompressed(num_heads: int, lengths: Lengths) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all heads, the values as they come out of the decompression."""
    q, k, kv = (
        torch.randn(lengths.num_tokens, num_heads, channels, dtype=torch.bfloat16, device="cuda")
        for channels in (KEY_DIM, KEY_DIM, DIMS.qk_nope_head_dim + DIMS.v_head_dim)
    )
    return q, k, kv[..., DIMS.qk_nope_head_dim :]
