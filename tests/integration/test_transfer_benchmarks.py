"""The benchmarks of transfers run at sizes that take seconds, and count what was sent."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheSpec, KVKind
from bench import cache_to_cache, exposed, receiving, transfer_gpu, transport
from bench.cache_pairs import Case, End, in_turns, open_pairs
from bench.table import Row

pytestmark = pytest.mark.slow

NHD, HND = KVCacheLayout.NHD, KVCacheLayout.HND
SPEC = KVCacheSpec(KVKind.GQA, num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32")
TOKENS = 37


def ignore(line: str) -> None:
    pass


def named(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row.name == name]


def all_positive(rows: Sequence[Row]) -> bool:
    return all(row.measured > 0 and (row.rival_measured is None or row.rival_measured > 0) for row in rows)


async def test_every_pair_of_a_run_transfers_all_of_a_prompt() -> None:
    equal = Case(SPEC, End(NHD, 16), End(NHD, 16), TOKENS, segment_bytes=8192)
    cases = [
        equal,
        replace(equal, target=End(HND, 8), digests=False),
        replace(equal, target=End(NHD, 16, ranks=2)),
        replace(equal, source=End(HND, 32, ranks=2), fixed_segments=True),
    ]
    async with open_pairs(cases) as pairs:
        seconds = await in_turns(pairs, TOKENS, 2)
        for pair, own in zip(pairs, seconds, strict=True):
            assert len(own) == 2
            assert all(each > 0 for each in own)
            assert pair.measure.gigabytes_per_s > 0
            assert pair.bytes_received == 2 * TOKENS * SPEC.bytes_per_token
            for cache in pair.place.caches:
                size = cache.shape.block_size
                for token in range(TOKENS + 1):
                    block = pair.place.block_ids[token // size] if token < cache.shape.num_slots else None
                    if block is not None:
                        slot = cache.view[:, :, block, token % size].contiguous().view(torch.uint8)
                        # The sender's caches hold ones, the receiver's twos.
                        assert bool((slot == (1 if token < TOKENS else 2)).all())


def test_cache_to_cache_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "BYTES_PER_ROUND", 16 << 20)
    monkeypatch.setattr(cache_to_cache, "IDLE_S", 0.1)
    scale = cache_to_cache.Scale(
        SPEC, tokens=128, few_tokens=32, many_tokens=256, rounds=10, many_rounds=2, small_rounds=2
    )
    rows = cache_to_cache.run(ignore, scale)
    assert all_positive(rows)
    measured = [row.work.partition(" tokens")[0] for row in named(rows, "cache to cache") if "NIXL" not in row.rival]
    assert measured == ["64", "128", "256"] + ["128"] * 8
    assert len(named(rows, "first transfer of a pair")) == 1


def test_transfers_between_gpus_run_on_a_cpu_too() -> None:
    equal = Case(SPEC, End(NHD, 16), End(NHD, 16), TOKENS, segment_bytes=1 << 20)
    variants = (replace(equal, target=End(HND, 8)), replace(equal, digests=False))
    model = transfer_gpu.Model("tiny", equal, variants, long_tokens=64)
    rows = transfer_gpu.measure(model, ("cpu", "cpu"), (TOKENS, 16), rounds=10)
    assert all_positive(rows)
    goals = [(row.work, row.goal) for row in named(rows, "cache to cache")]
    assert goals.pop() == ("64 tokens of tiny, NHD/16 to NHD/16", None)
    for tokens, (same, unequal, plain) in ((16, goals[:3]), (TOKENS, goals[3:])):
        assert same == (f"{tokens} tokens of tiny, NHD/16 to NHD/16", None)
        assert unequal == (f"{tokens} tokens of tiny, NHD/16 to HND/8", 0.95)
        assert plain[1] is None


def test_the_transport_alone_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "BYTES_PER_ROUND", 4 << 20)
    monkeypatch.setattr(transport, "SIZES_KIB", (64, 1024))
    rows = transport.run(ignore)
    assert all_positive(rows)
    assert [row.rival for row in rows if row.work.startswith("1 MiB")][:2] == ["ucx_perftest", "memcpy"]


def test_decoding_while_receiving_runs() -> None:
    setup = replace(receiving.on_cpu(), requests=2, context=40, tokens=256, rounds=1, steps=20)
    rows = receiving.run(ignore, setup)
    assert all_positive([row for row in rows if row.name != "received, limited"]), "a few steps may receive nothing"
    alone, received = (named(rows, name)[0].measured for name in ("decode step", "decode step, receiving"))
    assert named(rows, "slow-down, receiving")[0].measured == pytest.approx(received / alone)


def test_exposed_transfer_runs() -> None:
    setup = replace(exposed.on_cpu(), prompts=(96,), warm_tokens=8, rounds=1)
    rows = exposed.run(ignore, replace(setup, ways=setup.ways[:1]))
    share, transfer, prefill, _ = rows
    assert all_positive([prefill])
    assert transfer.measured >= 0.0  # all of it may be over when the first token is sampled
    assert share.measured == pytest.approx(100 * transfer.measured / prefill.measured)
    # How many layers a node sends together follows from its measured link, so the rest of the words may differ.
    assert all(row.work.startswith("96 tokens of the demo Llama's shape, chunks of 256") for row in rows)
