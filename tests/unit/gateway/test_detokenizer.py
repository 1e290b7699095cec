"""Text that comes token by token is the text of all tokens decoded together, and never half a character."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from baton.gateway.text.detokenizer import Detokenizer, byte_tokens, token_texts
from tests.unit.gateway.tokenizers import byte_fallback, byte_level, token_id

BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
REPLACEMENT = "\ufffd"

# NOTE: the replacement character is text too, but looks like a broken character until the next token comes.
text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=[REPLACEMENT, "▁"]), max_size=60)
words = st.text("quick brown fox 日本€😀é", max_size=60)


def pieces(tokenizer: Tokenizer, output: list[int], *, prompt: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, byte_tokens=byte_tokens(tokenizer, skip_special_tokens=True))
    return [*(detokenizer.push(number) for number in output), detokenizer.finish()]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
@settings(deadline=None)
@given(before=words, after=text | words)
def test_pieces_add_up_to_the_text_after_the_prompt(tokenizer: Tokenizer, before: str, after: str) -> None:
    prompt = tokenizer.encode(before).ids
    whole = tokenizer.encode(before + after).ids
    if whole[: len(prompt)] != prompt:
        return  # the tokenizer would cut the joined text differently
    output = whole[len(prompt) :]
    together = tokenizer.decode(whole)
    assert together == tokenizer.decode(prompt) + "".join(pieces(tokenizer, output, prompt=prompt))


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
@settings(deadline=None)
@given(after=text | words)
def test_no_piece_has_half_a_character(tokenizer: Tokenizer, after: str) -> None:
    output = tokenizer.encode("fox" + after, add_special_tokens=False).ids
    assert REPLACEMENT not in "".join(pieces(tokenizer, output, prompt=[]))


def byte_ids(data: bytes) -> list[int]:
    return [token_id(BYTE_FALLBACK, f"<0x{byte:02X}>") for byte in data]


def any_tokens(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any tokens, some unknown ones among them, and often many bytes in a row."""
    any_token = st.integers(0, tokenizer.get_vocab_size() + 2)
    if tokenizer is BYTE_LEVEL:
        return st.lists(any_token, max_size=80)
    byte = st.sampled_from(byte_ids(b"\r\x01 a\xe2\x82\xac\xf0\xff"))
    return st.lists(any_token | byte | st.just(token_id(tokenizer, "<eos>")), max_size=40)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
@settings(deadline=None)
@given(data=st.data())
def test_any_tokens_give_the_text_that_decoding_them_at_once_gives(
    tokenizer: Tokenizer, skip: bool, data: st.DataObject
) -> None:
    """Whatever the cuts between the pushes; and so does the text that is there after each cut, if nothing follows."""
    output = data.draw(any_tokens(tokenizer))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=6)))
    texts = token_texts(tokenizer, skip_special_tokens=skip)
    fallback = byte_tokens(tokenizer, skip_special_tokens=skip)
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=skip, texts=texts, byte_tokens=fallback)
    shown = ""
    for start, stop in zip([0, *cuts], [*cuts, len(output)], strict=True):
        shown += detokenizer.push(*output[start:stop])
        whole = tokenizer.decode(output[:stop], skip_special_tokens=skip)
        assert whole.startswith(shown)
        if detokenizer.held and whole.strip(" "):
            assert whole.endswith(detokenizer.held.lstrip(" "))
    assert shown + detokenizer.finish() == tokenizer.decode(output, skip_special_tokens=skip)


@settings(deadline=None)
@given(
    before=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=8),
    batches=st.lists(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40), max_size=4),
)
def test_known_texts_and_batches_change_no_text(before: list[int], batches: list[list[int]]) -> None:
    one_by_one = Detokenizer(BYTE_LEVEL, before)
    expected = "".join([*(one_by_one.push(each) for batch in batches for each in batch), one_by_one.finish()])
    for texts in (None, token_texts(BYTE_LEVEL, skip_special_tokens=True)):
        detokenizer = Detokenizer(BYTE_LEVEL, before, texts=texts)
        assert "".join([*(detokenizer.push(*batch) for batch in batches), detokenizer.finish()]) == expected


def test_only_byte_level_tokens_have_texts_of_their_own() -> None:
    assert token_texts(BYTE_LEVEL, skip_special_tokens=True) is not None
    assert token_texts(BYTE_FALLBACK, skip_special_tokens=True) is None


@settings(deadline=None)
@given(output=st.lists(st.integers(0, BYTE_FALLBACK.get_vocab_size() - 1), max_size=80))
def test_broken_bytes_lose_no_text_that_follows(output: list[int]) -> None:
    marker = token_id(BYTE_FALLBACK, "q")
    assert "".join(pieces(BYTE_FALLBACK, [*output, marker], prompt=[])).endswith("q")


def test_a_character_of_four_tokens_comes_with_the_token_after_it() -> None:
    output = [*byte_ids("😀".encode()), token_id(BYTE_FALLBACK, "q")]
    assert pieces(BYTE_FALLBACK, output, prompt=[]) == ["", "", "", "", "😀q", ""]
    assert pieces(BYTE_FALLBACK, output[:4], prompt=[]) == ["", "", "", "", "😀"]


def test_an_invalid_byte_makes_the_whole_run_of_bytes_invalid() -> None:
    output = byte_ids(b"\r\x01\xff")
    assert "".join(pieces(BYTE_FALLBACK, output, prompt=[])) == 3 * REPLACEMENT == BYTE_FALLBACK.decode(output)


def test_a_special_token_that_is_left_out_ends_no_run_of_bytes() -> None:
    output = byte_ids(b"\xe2\x82\xac")
    output.insert(1, token_id(BYTE_FALLBACK, "<eos>"))
    assert "".join(pieces(BYTE_FALLBACK, output, prompt=[])) == "€"


def test_text_that_is_held_back_can_be_looked_at() -> None:
    detokenizer = Detokenizer(BYTE_FALLBACK, [], byte_tokens=byte_tokens(BYTE_FALLBACK, skip_special_tokens=True))
    held = []
    for number in byte_ids(b"a\n\xe2\x82\xac\xff"):
        detokenizer.push(number)
        held.append(detokenizer.held)
    assert held == ["a", "a\n", "", "", "a\n€", ""]


def test_a_long_run_of_bytes_costs_one_decoding() -> None:
    class Counting:
        """Counts the tokens that are decoded."""

        decoded = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(BYTE_FALLBACK, name)

        def decode(self, token_ids: list[int], **options: Any) -> str:
            self.decoded += len(token_ids)
            text: str = BYTE_FALLBACK.decode(token_ids, **options)
            return text

    counting: Any = Counting()
    detokenizer = Detokenizer(counting, [], byte_tokens=byte_tokens(counting, skip_special_tokens=True))
    assert detokenizer.push(*byte_ids(b"a" * 4000)) == ""
    assert len(detokenizer.finish()) == 4000
    assert counting.decoded < 8100


def test_an_unfinished_character_is_shown_when_nothing_follows() -> None:
    output = [token_id(BYTE_FALLBACK, "<0xF0>")]
    assert pieces(BYTE_FALLBACK, output, prompt=[]) == ["", REPLACEMENT]


def test_invalid_bytes_are_not_held_back_for_ever() -> None:
    output = [token_id(BYTE_LEVEL, "ÿ")] * 400
    detokenizer = Detokenizer(BYTE_LEVEL, [])
    shown = [detokenizer.push(number) for number in output]
    assert len("".join(shown)) > 350
    assert len("".join(shown) + detokenizer.finish()) == 400


def test_the_first_word_keeps_the_space_before_it() -> None:
    prompt = BYTE_FALLBACK.encode("the").ids
    output = [token_id(BYTE_FALLBACK, piece) for piece in "▁fox"]
    assert "".join(pieces(BYTE_FALLBACK, output, prompt=prompt)) == " fox"


def test_special_tokens_have_no_text() -> None:
    output = BYTE_LEVEL.encode("the fox").ids
    output.insert(3, token_id(BYTE_LEVEL, "<eos>"))
    assert "".join(pieces(BYTE_LEVEL, output, prompt=[])) == "the fox"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
def test_special_tokens_are_text_on_request(tokenizer: Tokenizer) -> None:
    output = tokenizer.encode("the fox", add_special_tokens=False).ids
    output.insert(3, token_id(tokenizer, "<eos>"))
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=False)
    shown = "".join([*map(detokenizer.push, output), detokenizer.finish()])
    assert shown == tokenizer.decode(output, skip_special_tokens=False)
    assert "<eos>" in shown
