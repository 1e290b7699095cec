"""When saving KV pays: while there is credit, which saved tokens spend and tokens that come back earn."""

from hypothesis import given
from hypothesis import strategies as st

from baton.core.block_keys import KeyChain
from baton.engine.request import IntArray, int_array
from baton.engine.scheduling import save_credit
from baton.engine.scheduling.save_credit import SaveCredit

BLOCK_SIZE = 16
MOST = 10_000


def sequence(number: int, tokens: int) -> IntArray:
    """No other number's sequence begins with the same tokens."""
    return int_array([number, *range(1, tokens)])


def chain(salt: str = "") -> KeyChain:
    return KeyChain(identity="m", cache_salt=salt, block_size=BLOCK_SIZE)


def serve(credit: SaveCredit, tokens: IntArray, *, cached: int = 0, salt: str = "") -> None:
    """A request whose first `cached` tokens the cache has; what is new is saved if that pays."""
    keys = chain(salt)
    credit.began(keys, tokens, cached_blocks=cached // BLOCK_SIZE)
    if credit.pays:
        credit.saved(len(tokens) - cached)
    credit.ended(keys, tokens, num_blocks=len(tokens) // BLOCK_SIZE)


def spent(*, seen: int = 0) -> SaveCredit:
    """No credit is left; sequence 0 has been seen with so many tokens."""
    credit = SaveCredit(MOST, BLOCK_SIZE)
    if seen:
        serve(credit, sequence(0, seen))
    credit.saved(credit.tokens)
    assert not credit.pays
    return credit


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40))
def test_prompts_with_nothing_in_common_are_saved_until_the_credit_is_spent(lengths: list[int]) -> None:
    credit = SaveCredit(MOST, BLOCK_SIZE)
    for number, length in enumerate(lengths):
        before = credit.tokens
        serve(credit, sequence(number, length))
        assert credit.tokens == (before - length if before > 0 else before)
    assert credit.pays == (sum(lengths) < MOST)


def test_a_prefix_that_comes_back_after_the_cache_has_lost_it_earns_credit() -> None:
    credit = spent(seen=300)
    serve(credit, sequence(0, 400))
    assert credit.pays


def test_a_prefix_that_the_cache_still_has_earns_none() -> None:
    credit = spent(seen=300)
    serve(credit, sequence(0, 400), cached=304)
    assert not credit.pays


def test_a_beginning_that_all_prompts_share_and_the_cache_keeps_earns_none() -> None:
    credit = spent(seen=300)
    shared = sequence(0, 300)[:256]
    for number in range(1, 20):
        serve(credit, shared + int_array([1000 + number] * 200), cached=256)
    assert not credit.pays


def test_the_end_of_a_conversation_that_the_cache_has_lost_earns_though_its_beginning_is_cached() -> None:
    credit = spent(seen=5000)
    serve(credit, sequence(0, 5100), cached=1024)
    assert credit.pays


def test_another_salt_is_another_prefix() -> None:
    credit = spent(seen=300)
    serve(credit, sequence(0, 400), salt="b")
    assert not credit.pays


def test_what_the_stores_give_back_earns_credit_up_to_a_bound() -> None:
    credit = spent()
    credit.returned(1)
    assert credit.pays
    credit.returned(1_000_000)
    assert credit.tokens == MOST


@given(st.integers(64, 2000), st.integers(1, 30))
def test_as_long_as_prompts_return_all_are_saved(length: int, turns: int) -> None:
    credit = SaveCredit(3 * length + 1, BLOCK_SIZE)
    for number in range(turns):
        assert credit.pays
        serve(credit, sequence(number % 3, length))


def test_only_so_many_prefixes_are_remembered() -> None:
    credit = spent(seen=300)
    for number in range(1, save_credit._MARKS_MAX // 2 + 1):
        credit.ended(chain(), sequence(number, 300), num_blocks=300 // BLOCK_SIZE)
    serve(credit, sequence(0, 400))
    assert not credit.pays
