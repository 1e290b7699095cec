"""I1 by model checking: reference counts equal holders, and no held block is ever handed out as fresh."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.block_keys import KeyChain
from baton.engine.request import IntArray, int_array
from baton.engine.scheduling.block_manager import BlockManager

NUM_BLOCKS = 7
BLOCK_SIZE = 2
# Few different tokens and salts, so that sequences share beginnings.
SEQUENCES = st.lists(st.integers(0, 1), min_size=0, max_size=12)
SALTS = st.sampled_from(["", "a"])


class Holder:
    def __init__(self, tokens: IntArray, salt: str) -> None:
        self.tokens = tokens
        self.salt = salt
        self.keys = KeyChain(identity="m", cache_salt=salt, block_size=BLOCK_SIZE)
        self.blocks: list[int] = []


class BlockManagerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS)
        self.holders: list[Holder] = []
        # The registered content of each block: the salt, and the whole sequence up to the block's end.
        self.content: dict[int, tuple[str, bytes]] = {}
        self.followed: set[bytes] = set()
        self.blocks.follow()

    @rule(tokens=SEQUENCES, salt=SALTS)
    def hold(self, tokens: list[int], salt: str) -> None:
        holder = Holder(int_array(tokens), salt)
        needed = -(-len(tokens) // BLOCK_SIZE)
        cached = self.blocks.match(holder.keys, holder.tokens, len(tokens) // BLOCK_SIZE)
        for index, block_id in enumerate(cached):
            assert self.content[block_id] == (salt, holder.tokens[: (index + 1) * BLOCK_SIZE].tobytes())
        if self.blocks.num_free_without(cached) < needed - len(cached):
            return
        held_before = {block_id for other in self.holders for block_id in other.blocks}
        holder.blocks = self.blocks.take(cached, needed - len(cached))
        fresh = holder.blocks[len(cached) :]
        assert held_before.isdisjoint(fresh)
        for block_id in fresh:
            self.content.pop(block_id, None)
        self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), windowless=st.booleans(), reported=st.booleans())
    def register(self, data: st.DataObject, windowless: bool, reported: bool) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        for index in range(len(holder.tokens) // BLOCK_SIZE):
            content = (holder.salt, holder.tokens[: (index + 1) * BLOCK_SIZE].tobytes())
            key = holder.keys.key(index, holder.tokens)
            self.blocks.register(holder.blocks[index], key, windowless=windowless, reported=reported)
            self.content.setdefault(holder.blocks[index], content)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        self.blocks.report(data.draw(st.sampled_from(self.holders)).blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def replace_last(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        last = holder.blocks[-2:]
        own = self.blocks.replace(last)
        if own is not None:
            assert {block_id for other in self.holders if other is not holder for block_id in other.blocks}.isdisjoint(
                own
            )
            holder.blocks[-2:] = own
            for block_id in own:
                self.content.pop(block_id, None)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.blocks.give_back(holder.blocks)

    @invariant()
    def references_equal_holders(self) -> None:
        held = Counter(block_id for holder in self.holders for block_id in holder.blocks)
        assert [self.blocks._references[block_id] for block_id in range(NUM_BLOCKS)] == [
            held[block_id] for block_id in range(NUM_BLOCKS)
        ]
        assert self.blocks.num_free == NUM_BLOCKS - len(held)

    @invariant()
    def changes_lead_to_what_is_cached(self) -> None:
        changes = self.blocks.take_changes()
        assert changes is not None
        for digest, key in changes.items():
            if key is None:
                self.followed.discard(digest)
            else:
                self.followed.add(digest)
        assert self.followed == {key.digest for key in self.blocks.cached_keys()}

    def teardown(self) -> None:
        for holder in self.holders:
            self.blocks.give_back(holder.blocks)
        assert self.blocks.num_free == NUM_BLOCKS


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
