"""A text encoded piece by piece has the ids that the tokenizer itself gives, whatever the tokenizer's kind."""

from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from baton.gateway.text.text_pieces import PieceEncoder
from tests.unit.gateway.tokenizers import TEXTS, byte_fallback, byte_level, token_id

SPECIAL = ("<|start|>", "<|end|>", "<|end|>!", "[INST]", "|><")


def metaspace(scheme: str) -> Callable[[], Tokenizer]:
    """Pieces with a mark for each space; `first` marks only the very first word."""

    def build() -> Tokenizer:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False, fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<bos>", "<eos>"], show_progress=False)
        tokenizer.train_from_iterator([*TEXTS] * 3, trainer)
        return tokenizer

    return build


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator([*TEXTS] * 3, trainer)
    cls, sep = (("[CLS]", token_id(tokenizer, "[CLS]")), ("[SEP]", token_id(tokenizer, "[SEP]")))
    tokenizer.post_processor = processors.BertProcessing(sep, cls)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False, initial_alphabet=[]
    )
    tokenizer.train_from_iterator([*TEXTS] * 3, trainer)
    return tokenizer


def byte_level_with_spaces() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte level with a space before each text": byte_level_with_spaces,
    "byte fallback": byte_fallback,
    "metaspace, first": metaspace("first"),
    "metaspace, always": metaspace("always"),
    "metaspace, never": metaspace("never"),
    "word piece": word_piece,
    "unigram": unigram,
}

# What else a tokenizer may look for in texts.
MORE: dict[str, list[AddedToken]] = {
    "plain": [],
    "one that takes the spaces before it": [AddedToken("<mask>", special=True, normalized=False, lstrip=True)],
    "one that takes the spaces after it": [AddedToken("<mask>", special=True, normalized=False, rstrip=True)],
    "a whole word": [AddedToken("<mask>", special=True, normalized=False, single_word=True)],
    "a normalized one": [AddedToken("<mask>", special=True, normalized=True)],
    "ordinary text": [AddedToken("fox", normalized=False), AddedToken("\n\n", normalized=False)],
    "one that begins with a space": [AddedToken(" <mask>", special=True, normalized=False)],
}


def build(kind: str, more: str) -> Tokenizer:
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in SPECIAL])
    tokenizer.add_tokens(MORE[more])
    return tokenizer


BUILT = {(kind, more): build(kind, more) for kind in KINDS for more in MORE}

fragments = st.sampled_from(
    [*SPECIAL, "<mask>", "<bos>", "[CLS]", "<|", "end|>", "!", " ", "  ", "\n\n", "the quick", "fox", "é", "e\u0301"]
) | st.text("thequickAB ﬁ日<|>\n\t", max_size=8)
texts = st.lists(fragments, max_size=12).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(more=st.sampled_from(list(MORE)), conversation=st.lists(texts, min_size=1, max_size=4), add=st.booleans())
def test_pieces_have_the_ids_of_the_whole_text(kind: str, more: str, conversation: list[str], add: bool) -> None:
    tokenizer = BUILT[kind, more]
    encoder = PieceEncoder(tokenizer, cache_bytes=2000)
    for turns in range(1, len(conversation) + 1):
        text = "".join(conversation[:turns])
        expected = tokenizer.encode(text, add_special_tokens=add).ids
        assert encoder.encode(text, add_special_tokens=add, salt="") == expected


def test_a_text_that_comes_back_is_not_encoded_again() -> None:
    encoded: list[str] = []

    class Counting:
        """A tokenizer that notes what it encodes."""

        def __getattr__(self, name: str) -> object:
            return getattr(BUILT["byte level", "plain"], name)

        def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> object:
            encoded.extend(texts)
            return BUILT["byte level", "plain"].encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    encoder = PieceEncoder(cast("Tokenizer", Counting()))
    encoder.encode("<|start|>the fox<|end|>", add_special_tokens=True, salt="")
    assert encoded == ["<|start|>the fox", "<|end|>"]
    encoder.encode("<|start|>the fox<|end|><|start|>a dog<|end|>", add_special_tokens=True, salt="")
    assert encoded[2:] == ["<|start|>a dog"]
    encoder.encode("<|start|>a dog", add_special_tokens=True, salt="another tenant")
    assert encoded[3:] == ["<|start|>a dog"]


def test_the_cache_stays_within_its_bytes() -> None:
    encoder = PieceEncoder(BUILT["byte level", "plain"], cache_bytes=5000)
    for number in range(50):
        text = f"<|start|>{number} the quick fox" * 2
        encoder.encode(text, add_special_tokens=True, salt="")
    assert 0 < encoder.held_bytes <= 5000
