"""Caches in 8 bits on both sides of a real transfer: the same bytes, and the same tokens as one process."""

from pathlib import Path

import pytest
import torch

from baton.core.sampling import ResolvedSampling
from baton.core.types import TokenOutput
from baton.engine.build import BuiltRunner, build_runner
from baton.settings.config import DEMO_MODELS
from baton.settings.node_config import NodeSettings
from kvtransfer.leases import LeaseGrant
from tests.conformance.kv import as_bytes, eventually, job, linked, tokens_of
from tests.unit.engine.tiny import request, running

NUM_TOKENS = 8
GREEDY = ResolvedSampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
# A token on either side of an edge of every node's blocks, and several chunks.
LENGTHS = (63, 65, 150)
CHUNK_TOKENS = 64


def built(model: Path, layout: str, block_size: int, dtype: str) -> BuiltRunner:
    return build_runner(
        NodeSettings(
            model=model,
            kv_cache_layout=layout,
            block_size=block_size,
            num_blocks=1024 // block_size,
            kv_cache_dtype=dtype,
            device="cpu",
        )
    )


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 200, (length,), generator=torch.Generator().manual_seed(length)).tolist())


async def alone(process: BuiltRunner, length: int) -> list[TokenOutput]:
    async with running(process, max_batch_tokens=CHUNK_TOKENS, prefix_cache=False) as (engine, events):
        engine.submit(request("a", prompt_of(length), GREEDY))
        await events.finished("a")
    return events.tokens["a"]


async def handed_over(prefill: BuiltRunner, decode: BuiltRunner, length: int, transport: str) -> list[TokenOutput]:
    """Prefilled by one engine, decoded by another."""
    limits = {"max_batch_tokens": CHUNK_TOKENS, "prefix_cache": False}
    async with (
        linked(prefill.cache, decode.cache, transport=transport, segment_bytes=4096) as pair,
        running(prefill, **limits) as (source, events_p),
        running(decode, **limits) as (target, events_d),
    ):
        reservation = target.reserve(request("d", prompt_of(length), GREEDY))
        pair.decode.open_lease(LeaseGrant(1, reservation.block_ids, 0, length))
        source.submit(request("p", prompt_of(length), GREEDY, prefill_only=True))
        await events_p.until(lambda: "p" in events_p.tokens)
        (first,), blocks = events_p.tokens["p"], events_p.chunks["p"][-1].block_ids
        await pair.prefill.send(job(1, blocks, 0, length))
        await eventually(lambda: bool(pair.events.filled))
        ours, theirs = (
            tokens_of(side.cache, ids, length) for side, ids in ((prefill, blocks), (decode, reservation.block_ids))
        )
        assert torch.equal(as_bytes(ours), as_bytes(theirs))
        await source.abort("p")
        await pair.decode.close_lease(1)
        assert target.admit("d", first) is None
        await events_d.finished("d")
    return [first, *events_d.tokens["d"]]


@pytest.mark.parametrize("transport", ["loopback", "ucx"])
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(
    ("model", "layouts"), [("llama", ("HND", "BLNHC", "NHD")), ("deepseek", ("LBNC", "BLNC", "LBNC"))]
)
async def test_other_layouts_and_block_sizes_give_the_tokens_of_one_process(
    model: str, layouts: tuple[str, str, str], dtype: str, transport: str
) -> None:
    prefill, decode, single = (
        built(DEMO_MODELS / model, layout, size, dtype) for layout, size in zip(layouts, (8, 32, 16), strict=True)
    )
    whole = built(DEMO_MODELS / model, layouts[2], 16, "auto")
    assert prefill.cache.spec == decode.cache.spec == single.cache.spec != whole.cache.spec
    for length in LENGTHS:
        handed, expected = await handed_over(prefill, decode, length, transport), await alone(single, length)
        assert [token.token_id for token in handed] == [token.token_id for token in expected]
        logprobs = [token.logprob for token in expected]
        assert [token.logprob for token in handed] == pytest.approx(logprobs, abs=1e-4)
        # What shows that 1e-4 is narrow: an fp32 cache, which keeps what these have rounded, is not within it.
        unrounded = [token.logprob for token in await alone(whole, length)]
        assert unrounded != pytest.approx(logprobs, abs=1e-4)
