"""The index finds what a plain set of blocks per node would find, within its bound."""

from array import array
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.core.block_keys import BlockNumbers, KeyChain, number_of
from baton.gateway.core.prompt_blocks import PromptBlocks
from baton.gateway.fleet import prefix_index
from baton.gateway.fleet.prefix_index import PrefixIndex

NODES = ("a", "b", "c", "d")


class Prompt(BlockNumbers):
    """A prompt whose block numbers are given."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__([0] * len(numbers), identity="", cache_salt="", block_size=1)
        self._numbers = numbers


class IndexMachine(RuleBasedStateMachine):
    """Few blocks and nodes, so that they meet. The model is a set of blocks per node."""

    def __init__(self) -> None:
        super().__init__()
        self.swept_at_once, prefix_index._SWEPT_AT_ONCE = prefix_index._SWEPT_AT_ONCE, 2
        self.index = PrefixIndex()
        self.blocks: dict[str, set[int]] = {}
        self.outside: dict[str, set[int]] = {}
        self.below: dict[str, set[int]] = {}

    @rule(
        node=st.sampled_from(NODES),
        blocks=st.lists(st.integers(0, 12), max_size=6),
        some=st.sets(st.integers(0, 12)),
        fewer=st.sets(st.integers(0, 12)),
    )
    def store(self, node: str, blocks: list[int], some: set[int], fewer: set[int]) -> None:
        outside = some.intersection(blocks)
        below = outside & fewer
        self.index.store(node, blocks, outside, below)
        self.blocks.setdefault(node, set()).update(blocks)
        for known, marked in ((self.outside, outside), (self.below, below)):
            of_node = known.setdefault(node, set())
            of_node.difference_update(blocks)
            of_node.update(marked)

    @rule(node=st.sampled_from(NODES), blocks=st.lists(st.integers(0, 12), max_size=6))
    def remove(self, node: str, blocks: list[int]) -> None:
        self.index.remove(node, blocks)
        self.blocks.setdefault(node, set()).difference_update(blocks)
        self.outside.setdefault(node, set()).difference_update(blocks)
        self.below.setdefault(node, set()).difference_update(blocks)

    @rule(node=st.sampled_from(NODES))
    def forget(self, node: str) -> None:
        self.index.forget(node)
        self.blocks.pop(node, None)
        self.outside.pop(node, None)
        self.below.pop(node, None)

    @rule(prompt=st.lists(st.integers(0, 12), max_size=8), nodes=st.sets(st.sampled_from(NODES)))
    def look_up(self, prompt: list[int], nodes: set[str]) -> None:
        expected = {}
        for node in nodes & self.blocks.keys():
            length = next((at for at, block in enumerate(prompt) if block not in self.blocks[node]), len(prompt))
            if length:
                expected[node] = length
        assert self.index.cached_blocks(Prompt(prompt), nodes) == expected
        inside = {
            node: next((at for at in range(length) if prompt[at] in self.outside[node]), length)
            for node, length in expected.items()
        }
        assert self.index.blocks_inside(Prompt(prompt), expected) == inside
        below = {node: sum(block in self.below[node] for block in prompt[:length]) for node, length in expected.items()}
        assert self.index.blocks_below(Prompt(prompt), expected) == {node: n for node, n in below.items() if n}

    @invariant()
    def there_is_no_entry_that_no_node_ever_had(self) -> None:
        assert len(self.index) <= 13

    def teardown(self) -> None:
        prefix_index._SWEPT_AT_ONCE = self.swept_at_once


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(st.sampled_from(NODES), st.lists(st.integers(0, 30), max_size=8)), max_size=30))
def test_beyond_its_bound_the_least_recently_used_blocks_go(changes: list[tuple[str, list[int]]]) -> None:
    index, recent = PrefixIndex(max_blocks=10), dict[int, None]()
    for node, blocks in changes:
        index.store(node, blocks)
        for block in blocks:
            recent.pop(block, None)
            recent[block] = None
        assert len(index) <= 10
    kept = list(recent)[-10:]
    assert all(index.cached_blocks(Prompt([block]), NODES) for block in kept)
    assert not any(index.cached_blocks(Prompt([block]), NODES) for block in recent if block not in kept)


def test_what_is_loaded_later_has_no_entry_of_its_own() -> None:
    index = PrefixIndex(max_blocks=10)
    for first in range(0, 1000, 10):
        blocks = range(first, first + 10)
        index.store("a", blocks, blocks, blocks)
    assert len(index._outside._masks) == len(index._below._masks) == 10
    index.store("a", range(990, 1000), range(990, 1000))
    assert index.blocks_below(Prompt([990, 991]), {"a": 2}) == {}
    index.store("a", range(990, 1000))
    assert index._outside._masks == index._below._masks == {}
    index.store("a", range(990, 1000), range(990, 1000))
    index.forget("a")
    index.store("b", range(990, 1000))
    assert index.blocks_inside(Prompt([990, 991]), {"b": 2}) == {"b": 2}


def test_the_start_of_a_prompt_outlives_its_end() -> None:
    index = PrefixIndex(max_blocks=4)
    index.store("a", [1, 2, 3, 4])
    assert index.cached_blocks(Prompt([1, 2, 3, 4]), NODES) == {"a": 4}
    index.store("a", [5, 6])
    assert index.cached_blocks(Prompt([1, 2, 3, 4]), NODES) == {"a": 2}


def test_bits_of_lost_nodes_are_used_again() -> None:
    index = PrefixIndex()
    for number in range(1000):
        index.store(f"node-{number}", range(10))
        index.forget(f"node-{number}")
    index.store("last", [1])
    assert max(index._bits.values()) < 1 << 4
    assert len(index) == 1


def test_numbers_are_those_of_the_nodes_blocks() -> None:
    prompt = [7, 8, 9, 10, 11] * 60
    for salt, identity, size in (("", "m", 4), ("s", "m", 4), ("", "n", 4), ("", "m", 16)):
        chain = KeyChain(identity=identity, cache_salt=salt, block_size=size)
        expected = [number_of(chain.key(at, array("i", prompt)).digest) for at in range(len(prompt) // size)]
        numbers = PromptBlocks(prompt, cache_salt=salt).numbers(identity, size)
        assert numbers.up_to(2)[:2] == expected[:2]
        assert numbers.up_to(1000) == expected


def test_a_prompt_that_no_node_has_is_not_hashed_to_its_end() -> None:
    index, numbers = PrefixIndex(), BlockNumbers(range(16000), identity="m", cache_salt="", block_size=16)
    index.store("a", [1])
    assert index.cached_blocks(numbers, ["a"]) == {}
    assert len(numbers.up_to(0)) == 1


def test_looking_ahead_hashes_what_some_node_may_have_a_slice_at_a_time() -> None:
    tokens, index = list(range(2000)), PrefixIndex()
    known = BlockNumbers(tokens, identity="", cache_salt="", block_size=4)
    index.store("a", known.up_to(300))
    prompt = BlockNumbers(tokens, identity="", cache_salt="", block_size=4)
    sizes = [len(prompt._numbers) for _ in index.look_ahead(prompt)]
    assert all(later - earlier <= prefix_index._HASHED_AT_ONCE for earlier, later in pairwise([0, *sizes]))
    hashed = len(prompt._numbers)
    assert 300 < hashed < 500, "the rest of the prompt is on no node"
    assert index.cached_blocks(prompt, ["a"]) == {"a": 300}
    assert len(prompt._numbers) == hashed


def test_looking_ahead_for_a_prompt_that_no_node_has_costs_one_block() -> None:
    prompt = BlockNumbers(list(range(2000)), identity="", cache_salt="", block_size=4)
    assert not list(PrefixIndex().look_ahead(prompt))
    assert len(prompt._numbers) == 1


def test_looking_ahead_for_a_prompt_without_a_whole_block_is_nothing() -> None:
    assert not list(PrefixIndex().look_ahead(BlockNumbers([1, 2], identity="", cache_salt="", block_size=4)))
