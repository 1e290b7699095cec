"""KV that is converted on its way: the receiver holds bit for bit what it would have stored itself from the same
numbers, in every layout, and decodes from it as one process does from the same cache."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.core.errors import ConfigError
from baton.core.sampling import ResolvedSampling
from baton.core.types import TokenOutput
from baton.engine.build import BuiltRunner, build_runner
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.fp8 import quantize
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import FP8_DTYPES, KVCacheSpec, KVKind
from baton.models.loading.kv_scales import kv_scales
from baton.settings.node_config import NodeSettings
from kvtransfer.conversion import KVConversion
from kvtransfer.leases import LeaseGrant
from tests.conformance.kv import (
    GQA,
    LATE,
    MLA,
    as_bytes,
    eventually,
    job,
    linked,
    make_cache,
    plant,
    scattered_blocks,
    tokens_of,
)
from tests.unit.engine.tiny import prompt_of, request, running
from tests.unit.models.tiny import save_tiny

E4M3, E5M2 = FP8_DTYPES
GREEDY = ResolvedSampling(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
CHUNK_TOKENS = 16
# A token on either side of an edge of every node's blocks, and several chunks.
LENGTHS = (15, 17, 41)
# Layers with and without a window take turns, so that segments have every second layer.
WINDOWED = replace(GQA, num_layers=4, windows=(0, 5, 0, 5), dtype="bfloat16")


def scales_of(spec: KVCacheSpec) -> tuple[float, ...]:
    """No powers of two, and distinct for every layer and kind, so that no mistake rounds to the same bytes."""
    return tuple(0.013 * (3 + number) for number in range(spec.num_layers * spec.kv_factor))


def stored(values_LKTHC: Tensor, scales: Sequence[float], dtype: torch.dtype) -> Tensor:
    """The content of a cache of that dtype, as the reference of the kernels stores it."""
    layers, kinds = values_LKTHC.shape[:2]
    scales_LK = torch.tensor(scales).view(layers, kinds) if scales else None
    kept = torch.empty(values_LKTHC.shape, dtype=dtype)
    for layer in range(layers):
        for kind in range(kinds):
            scale = None if scales_LK is None else scales_LK[layer, kind]
            kept[layer, kind] = quantize(values_LKTHC[layer, kind], scale, dtype)
    return kept


def conversion_to(cache: PagedKVCache, dtype: str) -> KVConversion:
    return KVConversion(cache.spec.dtype, dtype, scales_of(cache.spec) if dtype in FP8_DTYPES else ())


@pytest.mark.parametrize("transport", ["loopback", "loopback" + LATE, "ucx"])
@pytest.mark.parametrize(
    ("spec", "dtype", "layouts", "sizes"),
    [
        (GQA, E4M3, ("NHD", "HND"), (4, 16)),
        (GQA, E5M2, ("HND", "BLHNC"), (8, 8)),
        (GQA, "float16", ("BLNHC", "NHD"), (16, 4)),
        (replace(GQA, dtype="float16"), E4M3, ("BLHNC", "BLNHC"), (8, 4)),
        (replace(GQA, dtype="bfloat16"), "float32", ("NHD", "HND"), (4, 8)),
        (MLA, E4M3, ("LBNC", "BLNC"), (4, 16)),
        (replace(MLA, dtype="float32"), E5M2, ("BLNC", "LBNC"), (16, 8)),
        (replace(MLA, dtype="float32"), "bfloat16", ("LBNC", "LBNC"), (8, 8)),
        (WINDOWED, E4M3, ("HND", "NHD"), (4, 16)),
    ],
)
async def test_the_receiver_holds_the_bytes_that_it_would_have_stored(
    spec: KVCacheSpec, dtype: str, layouts: tuple[str, str], sizes: tuple[int, int], transport: str
) -> None:
    prefill = make_cache(spec, KVCacheLayout[layouts[0]], sizes[0])
    decode = make_cache(replace(spec, dtype=dtype), KVCacheLayout[layouts[1]], sizes[1])
    conversion = conversion_to(prefill, dtype)
    start, length = 3, 45
    ours, theirs = scattered_blocks(prefill, length, 1), scattered_blocks(decode, length, 2)
    plant(prefill, ours, length)
    before = as_bytes(decode.storage).clone()
    async with linked(prefill, decode, transport=transport, conversion=conversion) as pair:
        pair.decode.open_lease(LeaseGrant(1, theirs, start, length, length))
        segments = await pair.prefill.send(job(1, ours, start, 30, resume_at=length))
        segments += await pair.prefill.send(job(1, ours, 30, length, resume_at=length, first_segment=len(segments)))
        await eventually(lambda: bool(pair.events.filled))
        totals = await pair.decode.close_lease(1)
        assert not pair.events.refused
        counters = pair.prefill.counters()
        assert counters.converted == len(segments) > 1
        assert pair.decode.counters().converted == 0
    # The sent bytes, counted on both sides, are the bytes that the receiver keeps.
    assert totals.bytes == sum(segment.payload_bytes for segment in segments)
    assert max(segment.payload_bytes for segment in segments) <= 1000
    values, kept = tokens_of(prefill, ours, length), tokens_of(decode, theirs, length)
    expected = stored(values, conversion.scales, kept.dtype)
    read_cells = 0
    for layer in range(spec.num_layers):
        first = max(start, spec.first_read(layer, length))
        assert torch.equal(as_bytes(kept[layer, :, first:]), as_bytes(expected[layer, :, first:]))
        read_cells += length - first
    assert totals.bytes == read_cells * decode.spec.bytes_per_token_layer
    # Nothing else was written.
    for layer in range(spec.num_layers):
        for block in range(decode.shape.num_blocks):
            if block not in theirs:
                assert not decode.layer(layer)[:, block].float().any()
    assert not before.any()


async def test_peers_of_other_dtypes_are_served_side_by_side() -> None:
    """One peer's conversion does not affect another."""
    prefill = make_cache(GQA, KVCacheLayout.NHD, 8)
    blocks = scattered_blocks(prefill, 20, 1)
    plant(prefill, blocks, 20)
    values = tokens_of(prefill, blocks, 20)
    for dtype, conversion in (("float32", None), (E4M3, conversion_to(prefill, E4M3)), (E4M3, None)):
        decode = make_cache(replace(GQA, dtype=dtype), KVCacheLayout.HND, 4)
        theirs = scattered_blocks(decode, 20, 3)
        async with linked(prefill, decode, transport="loopback", conversion=conversion) as pair:
            pair.decode.open_lease(LeaseGrant(1, theirs, 0, 20))
            segments = await pair.prefill.send(job(1, blocks, 0, 20))
            assert pair.prefill.counters().converted == (len(segments) if conversion else 0)
            if dtype == E4M3 and conversion is None:
                # Never silent: what was not agreed is refused by its size, before anything is written.
                await eventually(lambda: bool(pair.events.refused))
                assert not decode.memory.any()
                continue
            await eventually(lambda: bool(pair.events.filled))
        kept = tokens_of(decode, theirs, 20)
        expected = stored(values, conversion.scales if conversion else (), kept.dtype)
        assert torch.equal(as_bytes(kept), as_bytes(expected))


async def test_a_segment_must_hold_a_token_as_it_travels() -> None:
    """64 bytes of a token and layer in bfloat16 are 128 in float32."""
    spec = KVCacheSpec(KVKind.GQA, num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16")
    prefill = make_cache(spec, KVCacheLayout.NHD, 8)
    decode = make_cache(replace(spec, dtype=E4M3), KVCacheLayout.NHD, 8)
    with pytest.raises(ConfigError, match="segment_bytes is 100, and one token of one layer has 128 bytes"):
        async with linked(
            prefill, decode, transport="loopback", segment_bytes=100, conversion=KVConversion("bfloat16", "float32")
        ):
            pass


@dataclass(frozen=True)
class Checkpoints:
    """Two of one model: one with scales of its own for every layer, and one without."""

    scaled: Path
    plain: Path


@pytest.fixture(scope="module", params=["llama", "deepseek-v3"])
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    directory, plain = tmp_path_factory.mktemp("tiny"), tmp_path_factory.mktemp("tiny")
    config = save_tiny(request.param, directory).config
    shutil.copytree(directory, plain, dirs_exist_ok=True)
    weights = load_file(directory / "model.safetensors")
    for layer in range(config.num_hidden_layers):
        for number, kind in enumerate("k" if request.param == "deepseek-v3" else "kv"):
            weights[f"model.layers.{layer}.self_attn.{kind}_scale"] = torch.tensor(0.017 * (2 + layer) + 0.05 * number)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return Checkpoints(directory, plain)


def built(model: Path, layout: str, block_size: int, kv_cache_dtype: str, dtype: str) -> BuiltRunner:
    return build_runner(
        NodeSettings(
            model=model,
            dtype=dtype,
            kv_cache_layout=layout,
            block_size=block_size,
            num_blocks=512 // block_size,
            kv_cache_dtype=kv_cache_dtype,
            device="cpu",
        )
    )


async def handed_over(
    prefill: BuiltRunner, decode: BuiltRunner, single: BuiltRunner, length: int
) -> tuple[list[TokenOutput], list[TokenOutput]]:
    """Decoded after a converted hand-over, and by one process whose cache stored the prefill node's numbers."""
    prompt, scales = prompt_of(length), kv_scales(decode.runner.model)
    conversion = KVConversion(prefill.cache.spec.dtype, decode.cache.spec.dtype, scales)
    limits = {"max_batch_tokens": CHUNK_TOKENS, "prefix_cache": False}
    async with (
        linked(prefill.cache, decode.cache, transport="loopback", segment_bytes=4096, conversion=conversion) as pair,
        running(prefill, **limits) as (source, events_p),
        running(decode, **limits) as (target, events_d),
        running(single, **limits) as (alone, events_s),
    ):
        reservation = target.reserve(request("d", prompt, GREEDY))
        pair.decode.open_lease(LeaseGrant(1, reservation.block_ids, 0, length))
        source.submit(request("p", prompt, GREEDY, prefill_only=True))
        await events_p.until(lambda: "p" in events_p.tokens)
        (first,), blocks = events_p.tokens["p"], events_p.chunks["p"][-1].block_ids
        await pair.prefill.send(job(1, blocks, 0, length))
        await eventually(lambda: bool(pair.events.filled))
        expected = stored(tokens_of(prefill.cache, blocks, length), scales, decode.cache.view.dtype)
        kept = tokens_of(decode.cache, reservation.block_ids, length)
        assert torch.equal(as_bytes(kept), as_bytes(expected))
        await source.abort("p")
        await pair.decode.close_lease(1)
        into = alone.reserve(request("s", prompt, GREEDY)).block_ids
        for token, values in enumerate(expected.unbind(2)):
            block, offset = divmod(token, single.cache.shape.block_size)
            single.cache.view[:, :, into[block], offset] = values
        for engine, name, events in ((target, "d", events_d), (alone, "s", events_s)):
            assert engine.admit(name, first) is None
            await events.finished(name)
    return events_d.tokens["d"], events_s.tokens["s"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
async def test_a_decode_node_goes_on_as_one_process_from_the_same_cache(
    checkpoints: Checkpoints, kv_cache_dtype: str, dtype: str
) -> None:
    # A cache in e5m2 takes no checkpoint with scales, which are made for e4m3.
    has_scales = kv_cache_dtype == "fp8_e4m3"
    checkpoint = checkpoints.scaled if has_scales else checkpoints.plain
    layouts = (
        ("HND", "BLNHC", "NHD")
        if "LlamaForCausalLM" in (checkpoint / "config.json").read_text()
        else (
            "LBNC",
            "BLNC",
            "LBNC",
        )
    )
    prefill = built(checkpoint, layouts[0], 8, "auto", dtype)
    decode = built(checkpoint, layouts[1], 16, kv_cache_dtype, dtype)
    single = built(checkpoint, layouts[2], 4, kv_cache_dtype, dtype)
    scales = kv_scales(decode.runner.model)
    assert len(scales) == decode.cache.spec.num_layers * decode.cache.spec.kv_factor
    assert len(set(scales)) == (len(scales) if has_scales else 1)
    assert kv_scales(prefill.runner.model) == ()
    for length in LENGTHS:
        handed, expected = await handed_over(prefill, decode, single, length)
        assert [token.token_id for token in handed] == [token.token_id for token in expected]
        tolerance = 1e-4 if dtype == "float32" else 2e-2
        logprobs = [token.logprob for token in expected]
        assert [token.logprob for token in handed] == pytest.approx(logprobs, abs=tolerance)
