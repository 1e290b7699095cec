"""Every kind of model comes back from host memory and from files with all that it remembers.

That are KV of sliding windows, keys of sparse attention, latents, and recurrent states. The tokens are transformers'.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton.core.kv_entries import ENTRY_TOKENS
from baton.engine import tiered_prefixes
from baton.engine.build import BuiltRunner, build_runner
from baton.engine.engine import Engine
from baton.kvcache.spec import KVKind
from baton.settings.node_config import NodeSettings
from kvtransfer import offload_calls, offload_queue
from kvtransfer.parts import parts_of
from kvtransfer.ranked import RankedTransfer
from kvtransfer.records import EntryCounters
from kvtransfer.settings import TransferSettings
from kvtransfer.stores.entry import EntryLayout
from kvtransfer.stores.files import FileStore
from kvtransfer.transfer import KVTransfer
from tests.conformance.kv import DEADLINE_S, eventually
from tests.unit.engine.limits import limits
from tests.unit.engine.tiny import EventRecorder, greedy, prompt_of, request, transformers_greedy
from tests.unit.models.tiny import save_tiny

# By what they remember: windows in all layers and in some, an index; states of convolutions, of a delta rule with KV
# and with latents, and of Mamba.
FAMILIES = ("mistral-window", "gemma3", "deepseek-v32", "lfm2", "qwen3-next", "kimi-linear", "falcon-h1")
PROMPT = prompt_of(200)
NUM_DECODED = 70
# The caches hold one conversation.
NUM_BLOCKS = 20
BLOCK_SIZE = 16
WITH_STATES = frozenset(FAMILIES[3:])


@dataclass
class Node:
    """An engine with its stores.

    Attributes:
        transfer: of the one rank.
    """

    engine: Engine
    events: EventRecorder
    transfer: KVTransfer
    built: BuiltRunner
    floods: int = 0

    @property
    def counters(self) -> EntryCounters:
        return self.transfer.counters().entries

    async def run(self, name: str, prompt: tuple[int, ...], tokens: int) -> tuple[int, int, list[int]]:
        """How many tokens were read back and how many were cached, and the output."""
        wanted = request(name, prompt, greedy(tokens))
        loaded = (await self.engine.prefetch(wanted)).total
        self.engine.submit(wanted)
        await self.events.finished(name)
        return loaded, self.events.started[name].cached_tokens, self.events.ids(name)

    async def flood(self) -> None:
        """Other prompts take all blocks and states of the cache."""
        for _ in range(4):
            self.floods += 1
            await self.run(f"other {self.floods}", prompt_of(280, seed=self.floods), 1)
        # A load takes only blocks that no save holds.
        load = self.engine.load()
        await eventually(lambda: not self._is_busy() and self.engine.load().blocks_free == load.blocks_total)

    async def until_written(self) -> None:
        """Until files have all that host memory has."""
        await eventually(lambda: self.counters.entries > 0 and not self._is_busy())

    def _is_busy(self) -> bool:
        assert self.transfer._tiers is not None
        return self.transfer._tiers.is_busy or bool(self.transfer._thread.offloader.in_flight)


@pytest.fixture(autouse=True)
def _stores_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered_prefixes, "_FIND_S", DEADLINE_S)
    monkeypatch.setattr(tiered_prefixes, "_LOAD_S", DEADLINE_S)
    monkeypatch.setattr(offload_calls, "FIND_LIMIT_S", DEADLINE_S)
    monkeypatch.setattr(offload_queue, "STUCK_AFTER_S", DEADLINE_S)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, directory, save_tiny(request.param, directory)


@asynccontextmanager
async def started(
    directory: Path, files: Path, *, places: int = 600, block_size: int = BLOCK_SIZE, num_blocks: int = NUM_BLOCKS
) -> AsyncIterator[Node]:
    settings = NodeSettings(
        model=directory, num_blocks=num_blocks, block_size=block_size, device="cpu", threads=1, state_slots=4
    )
    built = build_runner(settings)
    layout = EntryLayout(parts_of(built.cache.spec))
    opened: list[KVTransfer] = []

    def make(on_filled: Any, on_refused: Any) -> KVTransfer:
        transfer_settings = TransferSettings(
            incarnation=1,
            transport="loopback",
            segment_bytes=1 << 16,
            staging_slots=2,
            digests=True,
            host_cache_bytes=places * layout.entry_bytes,
            stores=(partial(open_files, files),),
        )
        opened.append(KVTransfer(built.cache, transfer_settings, on_filled=on_filled, on_refused=on_refused))
        return opened[0]

    events = EventRecorder()
    transfer = RankedTransfer([make], message_bytes=1 << 17)
    transfer.leases.deliver_to(lambda *_: None, lambda *_: None)
    async with (
        transfer,
        Engine(
            built.runner, limits(max_batch_tokens=64), on_step=events, grammars=built.grammars, tier=transfer.entries
        ) as engine,
    ):
        yield Node(engine, events, opened[0], built)
        await eventually(lambda: engine.load().blocks_free == num_blocks)
        assert engine.leaked_blocks(lambda _: True) == 0


def open_files(directory: Path, layout: EntryLayout) -> FileStore:
    return FileStore(directory, namespace=layout.namespace, entry_bytes=layout.entry_bytes, max_bytes=1 << 30)


def remove_files(directory: Path) -> None:
    for path in directory.rglob("*.kv"):
        path.unlink()


def flip_a_bit_in_each_entry(node: Node, *, of_states: bool) -> None:
    """Damages the entries in host memory: those of KV, or the pieces of states."""
    assert node.transfer._tiers is not None
    for place in node.transfer._tiers._host._places.values():
        if (len(place.key.block.tokens) > 4 * ENTRY_TOKENS) == of_states:
            place.tensor[place.number % 100] ^= 1 << place.number % 8


async def test_a_conversation_comes_back_from_host_memory_and_from_files(
    family: tuple[str, Path, Any], tmp_path: Path
) -> None:
    name, directory, reference = family
    answer = transformers_greedy(reference, PROMPT, NUM_DECODED)
    turn = (*PROMPT, *answer, *prompt_of(9, seed=99))
    second = transformers_greedy(reference, turn, 5)
    async with started(directory, tmp_path) as node:
        assert (name in WITH_STATES) == (node.built.cache.state is not None)
        assert await node.run("fresh", PROMPT, NUM_DECODED) == (0, 0, answer)
        await node.flood()
        assert await node.run("again", PROMPT, NUM_DECODED) == (192, 192, answer)
        await node.flood()
        # The last token's KV and state are never computed.
        said = (len(PROMPT) + NUM_DECODED - 1) // ENTRY_TOKENS * ENTRY_TOKENS
        assert await node.run("turn", turn, 5) == (said, said, second)
        await node.until_written()
    async with started(directory, tmp_path, places=40, block_size=32, num_blocks=12) as node:
        assert await node.run("turn", turn, 5) == (said, said, second)
        assert node.counters.loaded["file"] > 0
        assert node.counters.damaged == 0


async def test_damaged_entries_are_misses(family: tuple[str, Path, Any], tmp_path: Path) -> None:
    name, directory, reference = family
    answer = transformers_greedy(reference, PROMPT, 5)
    async with started(directory, tmp_path) as node:
        await node.run("fresh", PROMPT, 5)
        await node.flood()
        await node.until_written()
        remove_files(tmp_path)
        flip_a_bit_in_each_entry(node, of_states=name in WITH_STATES)
        assert await node.run("again", PROMPT, 5) == (0, 0, answer)
        assert node.counters.damaged > 0


async def test_a_state_alone_comes_back_where_the_cache_has_the_blocks(tmp_path: Path) -> None:
    """The cache has a slot for a request, and two for snapshots."""
    directory = tmp_path / "model"
    reference = save_tiny("lfm2", directory)
    answer = transformers_greedy(reference, PROMPT, 5)
    async with started(directory, tmp_path / "files", num_blocks=200) as node:
        await node.run("fresh", PROMPT, 5)
        await node.flood()
        entries = sum(node.counters.loaded.values())
        assert await node.run("again", PROMPT, 5) == (192, 192, answer)
        assert node.built.cache.state is not None
        assert node.built.cache.state.spec.kind is KVKind.STATE
        pieces = len(EntryLayout(parts_of(node.built.cache.spec)).pieces)
        assert sum(node.counters.loaded.values()) - entries == pieces
