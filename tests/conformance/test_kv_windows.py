"""Layers with a sliding window send only the KV that will be read. Missing KV is never read, not through the prefix
cache either: tokens equal those of one process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from baton.core.sampling import ResolvedSampling
from baton.engine.build import BuiltRunner, build_runner
from baton.engine.engine import Engine
from baton.settings.node_config import NodeSettings
from kvtransfer.leases import LeaseGrant
from tests.conformance.kv import Pair, eventually, job, linked
from tests.unit.engine.tiny import EventRecorder, prompt_of, request, running
from tests.unit.models.tiny import save_tiny

# All layers have a window of 6; every second one 7; two of three 7; every second one, with sinks; every second one, and
# some that read others' KV; two of three, with other heads.
MODELS = ("mistral-window", "gemma2", "gemma3", "gpt-oss", "gemma3n", "gemma4-wide-mlps")
BLOCK_SIZE, CHUNK_TOKENS, NUM_TOKENS = 4, 16, 8
GREEDY = ResolvedSampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)


def built(directory: Path, layout: str, block_size: int) -> BuiltRunner:
    return build_runner(
        NodeSettings(
            model=directory, kv_cache_layout=layout, block_size=block_size, num_blocks=1024 // block_size, device="cpu"
        )
    )


async def alone(process: BuiltRunner, prompt: tuple[int, ...]) -> list[int]:
    async with running(process, max_batch_tokens=CHUNK_TOKENS, prefix_cache=False) as (engine, events):
        engine.submit(request("a", prompt, GREEDY))
        await events.finished("a")
    return events.ids("a")


@dataclass
class Cluster:
    """Two engines with prefix caches and the link between them."""

    pair: Pair
    source: Engine
    events_p: EventRecorder
    target: Engine
    events_d: EventRecorder
    numbers: "count[int]" = field(default_factory=lambda: count(1))

    async def ask(self, prompt: tuple[int, ...]) -> tuple[list[int], int, int]:
        """(tokens, prompt tokens that the decode node had, payload bytes received)."""
        number, length = next(self.numbers), len(prompt)
        name = str(number)
        reservation = self.target.reserve(request(name, prompt, GREEDY))
        start, resume_at = reservation.cached_tokens, reservation.resume_at
        self.pair.decode.open_lease(LeaseGrant(number, reservation.block_ids, start, length, resume_at))
        self.source.submit(request(name, prompt, GREEDY, prefill_only=True))
        await self.events_p.until(lambda: name in self.events_p.tokens)
        sent = 0
        for chunk in self.events_p.chunks[name]:
            if chunk.token_stop > start:
                part = job(number, chunk.block_ids, start, chunk.token_stop, resume_at=resume_at, first_segment=sent)
                sent += len(await self.pair.prefill.send(part))
                start = chunk.token_stop
        await eventually(lambda: any(filled.number == number for filled in self.pair.events.filled))
        await self.source.abort(name)
        totals = await self.pair.decode.close_lease(number)
        (first,) = self.events_p.tokens[name]
        assert self.target.admit(name, first) is None
        await self.events_d.finished(name)
        assert not self.pair.events.refused
        return [first.token_id, *self.events_d.ids(name)], reservation.cached_tokens, totals.bytes


@asynccontextmanager
async def cluster(prefill: BuiltRunner, decode: BuiltRunner) -> AsyncIterator[Cluster]:
    limits = {"max_batch_tokens": CHUNK_TOKENS, "prefix_cache": True}
    # So a read of unwritten KV changes the tokens.
    decode.cache.view.fill_(1e3)
    async with (
        linked(prefill.cache, decode.cache, transport="loopback", segment_bytes=4096) as pair,
        running(prefill, **limits) as (source, events_p),
        running(decode, **limits) as (target, events_d),
    ):
        yield Cluster(pair, source, events_p, target, events_d)


@pytest.mark.parametrize("name", MODELS)
async def test_tokens_are_those_of_one_process_and_only_the_window_is_sent(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    prefill, decode = built(tmp_path, "HND", 8), built(tmp_path, "NHD", BLOCK_SIZE)
    single = built(tmp_path, "NHD", 16)
    spec = single.cache.spec
    window = max(spec.windows)
    assert window in (6, 7)
    prompt = prompt_of(45)
    async with cluster(prefill, decode) as nodes:
        tokens, cached, num_bytes = await nodes.ask(prompt)
        assert (tokens, cached) == (await alone(single, prompt), 0)
        # Some blocks more than the window, so that the prompt can be found again up to its last full block.
        resume_at = 44 - BLOCK_SIZE + 1
        kept = [45 if not one else 45 - (resume_at - one + 1) for one in spec.windows]
        assert num_bytes == sum(kept) * spec.bytes_per_token_layer
        # A conversation goes on: all of the first turn but its unfinished block is found again.
        longer = (*prompt, *tokens, *prompt_of(9, seed=1))
        tokens, cached, _ = await nodes.ask(longer)
        assert (tokens, cached) == (await alone(single, longer), (45 + NUM_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE)
        # Another request shares less: the windows' KV in front of its own tokens never came, so nothing is found.
        branch = (*prompt[:30], *prompt_of(11, seed=2))
        tokens, cached, _ = await nodes.ask(branch)
        assert (tokens, cached) == (await alone(single, branch), 0)
        # The same prompt again is found up to its last full block.
        tokens, cached, _ = await nodes.ask((*prompt[:44], *prompt_of(3, seed=3)))
        assert (tokens, cached) == (await alone(single, (*prompt[:44], *prompt_of(3, seed=3))), 44)


async def test_a_block_that_lacks_windows_makes_room_for_one_that_has_them(tmp_path: Path) -> None:
    save_tiny("gemma2", tmp_path)
    prefill, decode = built(tmp_path, "HND", 8), built(tmp_path, "NHD", BLOCK_SIZE)
    prompt = prompt_of(45)
    async with cluster(prefill, decode) as nodes:
        await nodes.ask(prompt)
        nodes.target.submit(request("here", (*prompt[:30], *prompt_of(5, seed=4)), GREEDY))
        await nodes.events_d.finished("here")
        branch = (*prompt[:30], *prompt_of(11, seed=2))
        tokens, cached, _ = await nodes.ask(branch)
        assert (tokens, cached) == (await alone(prefill, branch), 28)
