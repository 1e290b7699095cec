"""Tries every order of a world's events."""

import marshal
from dataclasses import dataclass
from hashlib import blake2b

from tests.conformance.kv_state import State, load, save
from tests.conformance.kv_world import Event, World


@dataclass(frozen=True)
class Explored:
    states: int
    transitions: int
    ends: int
    longest: int = 0


def _key(state: State) -> bytes:
    return blake2b(marshal.dumps(state, 2), digest_size=16).digest()


def explore(world: World, limit=10**9) -> Explored:
    seen = set()
    start = save(world)
    seen.add(_key(start))
    path: list[Event] = []
    stack = [(start, iter(world.possible()))]
    transitions = ends = longest = 0
    while stack:
        state, events = stack[-1]
        event = next(events, None)
        if event is None:
            stack.pop()
            if path:
                path.pop()
            continue
        load(world, state)
        transitions += 1
        idle = world.happen(event)
        if idle:
            if world.is_over():
                ends += 1
            continue
        after = save(world)
        key = _key(after)
        if key in seen:
            continue
        seen.add(key)
        if len(seen) > limit:
            break
        path.append(event)
        stack.append((after, iter(world.possible())))
        longest = max(longest, len(path))
    return Explored(len(seen), transitions, ends, longest)
