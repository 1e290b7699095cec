"""Random saves, loads, drops, stops and failing stores at once: what a load reports is what was computed."""

import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import pytest

from baton.core.kv_entries import ENTRY_TOKENS, EntryKey
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from tests.conformance.late import Script, late
from tests.unit.kvtransfer.offloading import MemoryStore, User, World, keys_of

SPEC = KVCacheSpec(KVKind.GQA, num_layers=2, num_kv_heads=1, head_dim=1, dtype="float32")
BLOCK = 32
EACH = ENTRY_TOKENS // BLOCK
SEQUENCES = [keys_of(4, seed=seed, salt=str(seed % 2)) for seed in range(4)]
ACTIONS = 120


@dataclass(frozen=True)
class Begun:
    """A load or save that has not been checked yet."""

    user: User
    keys: tuple[EntryKey, ...]
    blocks: tuple[int, ...]
    future: Future[int]
    is_load: bool


class Forgetful(MemoryStore):
    """A store that loses, damages and refuses entries."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__("forgetful")
        self._rng = rng

    def get(self, key: EntryKey, into: memoryview) -> bool:
        found = super().get(key, into)
        match self._rng.randrange(6):
            case 0 | 3 | 4:
                into[self._rng.randrange(len(into) // 8)] ^= 1
            case 1:
                return False
            case 2:
                raise OSError("the disk is gone")
        return found

    def has(self, keys: Sequence[EntryKey]) -> int:
        return self._rng.randrange(len(keys) + 1)


def value_of(key: EntryKey) -> float:
    return float(int.from_bytes(key.block.digest[:3], "little"))


def write(user: User, keys: tuple[EntryKey, ...], blocks: tuple[int, ...]) -> None:
    for key in keys:
        for block in blocks[key.number * EACH : (key.number + 1) * EACH]:
            user.cache.view[:, :, block] = value_of(key)


def check(begun: Begun, taken: set[int]) -> None:
    count = begun.future.result(timeout=0)
    assert 0 <= count <= len(begun.keys)
    if begun.is_load:
        for key in begun.keys[:count]:
            for block in begun.blocks[key.number * EACH : (key.number + 1) * EACH]:
                assert bool((begun.user.cache.view[:, :, block] == value_of(key)).all())
    taken.difference_update(begun.blocks)
    for block in begun.blocks:  # the blocks are another request's at once
        begun.user.cache.view[:, :, block] = -1.0


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_load_never_reports_what_was_not_computed(seed: int, on_gpu: bool) -> None:
    rng = random.Random(seed)
    store = Forgetful(random.Random(seed + 1000))
    world = World(SPEC, places=rng.choice([2, 3, 6, 20]), stores=[store] if seed % 4 else [])
    shape = KVCacheShape(KVCacheLayout.NHD, BLOCK, 48)
    users = [
        world.user(PagedKVCache(SPEC, shape), late(Script(seed=seed + number), on_gpu=on_gpu)) for number in range(2)
    ]
    taken: dict[int, set[int]] = {0: set(), 1: set()}
    running: list[tuple[int, Begun]] = []
    for _ in range(ACTIONS):
        number = rng.randrange(2)
        user, keys = users[number], rng.choice(SEQUENCES)
        free = [block for block in range(shape.num_blocks) if block not in taken[number]]
        match rng.randrange(10):
            case 0 | 1 | 2 | 3 if len(free) >= len(keys) * EACH:
                blocks = tuple(rng.sample(free, len(keys) * EACH))
                taken[number].update(blocks)
                is_load = rng.random() < 0.6
                if is_load:
                    keys = keys[rng.randrange(2) :]
                    future = user.begin_load(keys, blocks, timeout_s=rng.choice([0.0, 1.0, 60.0]))
                else:
                    write(user, keys, blocks)
                    future = user.begin_save(keys, blocks)
                running.append((number, Begun(user, keys, blocks, future, is_load)))
            case 4:
                user.offloader.drop(keys[rng.randrange(4) :], Future())
            case 5:
                user.offloader.drop_roots(frozenset({keys[0].root}), Future())
            case 6 | 7:
                world.forget_host(keys[rng.randrange(4) :])
            case 8 if running:
                index, begun = rng.choice(running)
                users[index].offloader.stop(begun.future)
        world.clock.now_s += rng.choice([0.0, 0.0, 0.7])
        for _ in range(rng.randrange(12)):
            user.offloader.step()
        for index, begun in tuple(running):
            if begun.future.done():
                running.remove((index, begun))
                check(begun, taken[index])
    for index, begun in running:
        world.result(begun.future)
        check(begun, taken[index])
    world.check_nothing_is_left()
