"""The bytes of an output's tokens, put together, are its text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from baton.gateway.text.detokenizer import decoder_of
from baton.gateway.text.tokenizer import TokenPieces
from tests.unit.gateway.test_text_pieces import byte_level_with_spaces, metaspace
from tests.unit.gateway.tokenizers import byte_fallback, byte_level, token_id

KINDS = {"byte level": byte_level(), "byte level with spaces": byte_level_with_spaces(), "fallback": byte_fallback()}


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=40))
def test_they_add_up_to_the_text(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    pieces = TokenPieces(tokenizer)
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    together = b"".join(pieces.token_bytes(number) for number in token_ids).decode()
    # Some decoders drop the space that the encoder puts before the text.
    assert tokenizer.decode(token_ids) in (together, together.removeprefix(" "))


@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_the_decoder_is_read_as_the_file_has_it(kind: str) -> None:
    tokenizer = KINDS[kind] if kind in KINDS else Tokenizer(models.BPE())
    assert decoder_of(tokenizer) == json.loads(tokenizer.to_str())["decoder"]


def test_half_a_character_is_its_byte() -> None:
    tokenizer = KINDS["fallback"]
    assert TokenPieces(tokenizer).token_bytes(token_id(tokenizer, "<0x0A>")) == b"\n"
    assert TokenPieces(tokenizer).token_bytes(token_id(tokenizer, "<0xF0>")) == b"\xf0"
    tokenizer = KINDS["byte level"]
    assert TokenPieces(tokenizer).token_bytes(token_id(tokenizer, "Ġ")) == b" "


def test_a_special_token_is_its_name() -> None:
    for tokenizer in KINDS.values():
        assert TokenPieces(tokenizer).token_bytes(token_id(tokenizer, "<eos>")) == b"<eos>"


def test_an_id_without_token_has_no_bytes() -> None:
    assert TokenPieces(KINDS["byte level"]).token_bytes(10**6) == b""


def test_marks_of_spaces_are_spaces() -> None:
    tokenizer: Tokenizer = metaspace("always")()
    tokenizer.decoder = decoders.Metaspace()
    pieces = TokenPieces(tokenizer)
    token_ids = tokenizer.encode("the fox").ids
    assert b"".join(map(pieces.token_bytes, token_ids)) == b" the fox"
