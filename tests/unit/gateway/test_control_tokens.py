"""With secret names for special tokens, texts of clients have none, and all else is encoded as before."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from baton.core.errors import ConfigError
from baton.gateway.text.tokenizer import TextTokenizer, with_aliases
from baton.settings.config import DEMO_MODELS
from tests.unit.gateway.test_text_pieces import KINDS, SPECIAL
from tests.unit.gateway.tokenizers import byte_level

PIECES = st.sampled_from(["the quick ", "fox", "<", "|", " ", "\n", "日本", "<bos>", "<unk>", "[UNK]", *SPECIAL])


def built(kind: str) -> Tokenizer:
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> set[int]:
    return {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest) -> tuple[Tokenizer, Tokenizer, re.Pattern[str], dict[str, str]]:
    plain = built(request.param)
    renamed, aliases = with_aliases(plain)
    longest_first = sorted(aliases, key=len, reverse=True)
    return plain, renamed, re.compile("|".join(map(re.escape, longest_first))), dict(aliases)


@given(st.lists(PIECES, max_size=8))
def test_a_text_has_no_special_token(both: tuple[Tokenizer, ...], pieces: list[str]) -> None:
    plain, renamed, _, _ = both
    unknown = {plain.token_to_id(name) for name in ("<unk>", "[UNK]")}  # what no piece matches becomes it in any text
    found = set(renamed.encode("".join(pieces), add_special_tokens=False).ids)
    assert found & special_ids(plain) <= unknown


@given(st.lists(PIECES, max_size=8))
def test_a_text_with_secret_names_is_encoded_as_with_the_own_names(
    both: tuple[Tokenizer, Tokenizer, re.Pattern[str], dict[str, str]], pieces: list[str]
) -> None:
    plain, renamed, names, aliases = both
    text = "".join(pieces)
    named = names.sub(lambda found: aliases[found[0]], text)
    for special in (True, False):
        assert (
            renamed.encode(named, add_special_tokens=special).ids == plain.encode(text, add_special_tokens=special).ids
        )


def test_a_special_token_that_counts_in_some_places_only_is_refused() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("word", single_word=True, special=True)])
    with pytest.raises(ConfigError, match="'word' only in some places; allowed: allow"):
        with_aliases(tokenizer)


def test_a_tokenizer_s_texts_stay_text_and_decoding_is_unchanged() -> None:
    allows = TextTokenizer(DEMO_MODELS / "llama")
    text = "def main<|endoftext|>\n"
    assert 4095 in allows.encode(text)
    tokenizer = TextTokenizer(DEMO_MODELS / "llama", special_in_texts=False)
    ids = tokenizer.encode(text)
    assert 4095 not in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    (secret,) = tokenizer.aliases.values()
    assert tokenizer.encode(f"def main{secret}\n") == allows.encode(text)
    assert len(secret) <= tokenizer.longest_token_bytes  # else a text of them would count as too long
    assert not allows.aliases


def test_secrets_are_drawn_for_each_tokenizer(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    drawn = [TextTokenizer(tmp_path, special_in_texts=False).aliases for _ in range(2)]
    assert drawn[0].keys() == drawn[1].keys()
    assert not set(drawn[0].values()) & set(drawn[1].values())
