"""Names of blocks that are found without hashing are the names that hashing gives."""

import random
from array import array

from baton.core.block_keys import BlockKey, BlockNumbers, IntArray, KeyChain, KeyChains, KnownSlices, number_of

SIZE = 4


def chain(salt: str = "") -> KeyChain:
    return KeyChain(identity="m", cache_salt=salt, block_size=SIZE)


def hashed(tokens: IntArray, salt: str = "") -> list[BlockKey]:
    keys = chain(salt)
    return [keys.key(index, tokens) for index in range(len(tokens) // SIZE)]


def by_content(*sequences: list[BlockKey]) -> dict[tuple[bytes, bytes], BlockKey]:
    return {(key.parent, key.tokens): key for keys in sequences for key in keys}


def test_keys_of_other_sequences_are_those_that_hashing_gives() -> None:
    chance = random.Random(1)
    known: dict[tuple[bytes, bytes], BlockKey] = {}
    prompts = [array("i")]
    for _ in range(60):
        begin = chance.choice(prompts)
        begin = begin[: chance.randint(0, len(begin))]
        tokens = begin + array("i", [chance.randrange(3) for _ in range(chance.randint(0, 20))])
        prompts.append(tokens)
        keys, want = chain(), hashed(tokens)
        count = chance.randint(0, len(want))
        keys.add_known(tokens, count, known)
        found = keys.known_keys(count)
        assert found == want[: len(found)]
        assert len(found) == next(
            (n for n, key in enumerate(want[:count]) if (key.parent, key.tokens) not in known), count
        )
        assert [keys.key(index, tokens) for index in range(len(want))] == want
        known |= by_content(want[: chance.randint(0, len(want))])


def test_a_block_after_another_one_or_of_another_tenant_is_not_found() -> None:
    tokens = array("i", [1, 2, 3, 4, 5, 6, 7, 8])
    known = by_content(hashed(tokens))
    moved, other = chain(), chain("tenant")
    moved.add_known(tokens[SIZE:], 1, known)
    other.add_known(tokens, 2, known)
    assert moved.known_keys(2) == other.known_keys(2) == []


def test_a_copy_of_a_chain_grows_by_itself() -> None:
    chains, tokens = KeyChains(), array("i", range(SIZE))
    given = chains.of(identity="m", cache_salt="", block_size=SIZE)
    given.key(0, tokens)
    copied = given.copy()
    copied.key(1, tokens + array("i", [9] * SIZE))
    assert chains.of(identity="m", cache_salt="", block_size=SIZE) is given
    assert len(given.known_keys(2)) == 1
    other = tokens + array("i", [8] * SIZE)
    assert given.key(1, other) == hashed(other)[1]


def test_numbers_of_known_slices_are_those_that_hashing_gives() -> None:
    chance, slices = random.Random(2), KnownSlices(max_slices=6)
    prompts = [[chance.randrange(5) for _ in range(SIZE * 64 * 3)] for _ in range(3)]
    for _ in range(60):
        kept = chance.choice(prompts)
        prompt = kept[: chance.randint(0, len(kept))] + [chance.randrange(5) for _ in range(chance.randint(0, 900))]
        salt = chance.choice(("", "tenant"))
        numbers = BlockNumbers(
            chance.choice((prompt, array("i", prompt))), identity="m", cache_salt=salt, block_size=SIZE
        )
        hashed_at_once = 1
        while hashed_at_once < len(numbers):  # as an index asks for them
            numbers.up_to(hashed_at_once, slices)
            hashed_at_once += 64
        want = [number_of(key.digest) for key in hashed(array("i", prompt), salt)]
        assert numbers.up_to(len(numbers), slices) == want
