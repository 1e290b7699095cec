"""Tokenizers in tiktoken's and sentencepiece's form become a tokenizer.json that gives the ids of the originals."""

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from baton.core.errors import ConfigError
from baton.gateway.text.chat.checkpoint_files import read_checkpoint
from baton.gateway.text.tokenizer import TextTokenizer
from baton.models.loading.tokenizer_files import byte_pairs, find
from baton.models.loading.tokenizer_files.find import tokenizer_json
from baton.settings.config import DEMO_MODELS

ROOT = Path(__file__).resolve().parents[3]
CORPUS = [line for name in ("README.md", "docs/usage.md") for line in (ROOT / name).read_text().splitlines()] + [
    *(
        "naïve café, façade",
        "北京市 Pascal 汉字abc 你好世界",
        "ありがとう 한국어 привет мир",
        "don't I'LL we've 12345 3.14",
    )
    * 3
]
PIECES = [
    *("the ", "Hello", "  ", "\n", "\n\n", "world", "don't", "I'LL", "naïve", "北京", "汉字abc", "ありがとう", "😀"),
    *("👩\u200d👩\u200d👧", "12345", "3.14", " a", "aaaaaaa", "\t", "==", "----", "(){}[];", "привет", "العربية"),
    *("\u00a0", "\r\n", "_", "▁", "\x00"),
]
TEKKEN_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def texts() -> list[str]:
    draw = random.Random(0)
    return ["", " ", *CORPUS[:60], *("".join(draw.choices(PIECES, k=draw.randrange(1, 24))) for _ in range(300))]


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    )
    byte_of = {letter: byte for byte, letter in byte_pairs._letters().items()}
    return {bytes(map(byte_of.__getitem__, token)): rank for token, rank in trained.get_vocab().items()}


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where converted files are kept."""
    monkeypatch.setattr(find, "cache_places", lambda kind: iter([tmp_path / "kept"]))


def checkpoint(directory: Path, **files: object) -> Path:
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        path = directory / name.replace("__", ".")
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return directory


def kimi(directory: Path, ranks: dict[bytes, int], **config: object) -> Path:
    lines = b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items())
    decoder = {str(len(ranks) + 1): {"content": "<|im_end|>", "special": True}}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": decoder, "chat_template": "K2"} | config
    return checkpoint(directory, tiktoken__model=lines, tokenizer_config__json=config)


def tekken(directory: Path, ranks: dict[bytes, int], **changed: object) -> Path:
    config = {"pattern": TEKKEN_PATTERN, "default_vocab_size": len(ranks) + 30, "default_num_special_tokens": 40}
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for token, rank in ranks.items()]
    ordered = sorted(vocab, key=lambda token: int(str(token["rank"])))
    return checkpoint(directory, tekken__json={"config": config, "vocab": ordered, **changed})


def llama2(directory: Path, files: dict[str, object] | None = None, **options: Any) -> Path:
    made = io.BytesIO()
    given: dict[str, Any] = {
        **{"model_type": "bpe", "vocab_size": 500, "byte_fallback": True, "normalization_rule_name": "identity"},
        **{"remove_extra_whitespaces": False, "character_coverage": 0.99, "minloglevel": 3, **options},
    }
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=made, **given)
    return checkpoint(directory, tokenizer__model=made.getvalue(), **(files or {}))


def test_a_tiktoken_file_of_kimi_is_exact(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    directory = kimi(tmp_path / "kimi", ranks)
    original = tiktoken.Encoding(
        "kimi", pat_str=byte_pairs.KIMI_PATTERN, mergeable_ranks=ranks, special_tokens={"<|im_end|>": len(ranks) + 1}
    )
    ours = TextTokenizer(directory)
    for text in texts():
        assert ours.encode(text) == original.encode(text), text
        assert ours.decode(original.encode(text)) == text
    assert ours.encode("a<|im_end|>") == original.encode("a<|im_end|>", allowed_special="all")
    reserved = len(ranks) + 257
    assert ours.encode(f"<|reserved_token_{reserved}|>") == [reserved]


def test_chat_templates_and_special_tokens_of_a_converted_checkpoint_are_found(
    tmp_path: Path, ranks: dict[bytes, int]
) -> None:
    found = read_checkpoint(kimi(tmp_path / "kimi", ranks), None)
    assert found.templates == {"default": "K2"}
    assert found.tokens["<|im_end|>"] == len(ranks) + 1
    assert "<|im_end|>" in found.special


@pytest.mark.parametrize("listed", [True, False])
def test_a_tekken_file_is_exact(tmp_path: Path, ranks: dict[bytes, int], listed: bool) -> None:
    names = ("<unk>", "<s>", "</s>", "[INST]")
    special = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)]
    directory = tekken(tmp_path / "mistral", ranks, **({"special_tokens": special} if listed else {}))
    used = {token: rank for token, rank in ranks.items() if rank < len(ranks) - 10}
    original = tiktoken.Encoding("tekken", pat_str=TEKKEN_PATTERN, mergeable_ranks=used, special_tokens={})
    ours = TextTokenizer(directory)
    for text in texts():
        expected = [rank + 40 for rank in original.encode(text)]
        assert ours.encode(text) == [1, *expected], text
        assert ours.decode(expected) == text
    assert ours.encode("[INST]</s><SPECIAL_39>", add_special_tokens=False) == [3, 2, 39]


def test_a_sentencepiece_file_is_exact(tmp_path: Path) -> None:
    directory = llama2(tmp_path / "llama")
    original = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    ours = TextTokenizer(directory)
    for text in texts():
        expected = original.encode(text)
        assert ours.encode(text) == [1, *expected], text
        assert ours.decode(expected) == original.decode(expected)


def test_tokens_around_a_prompt_and_added_ones_are_those_of_the_config(tmp_path: Path) -> None:
    files = {
        "tokenizer_config__json": {"add_bos_token": False, "add_eos_token": True},
        "added_tokens__json": {"<|im_start|>": 500},
    }
    ours = TextTokenizer(llama2(tmp_path / "llama", files, user_defined_symbols=["[REF]"]))
    assert ours.encode("<|im_start|>") == [500, 2]
    assert len(ours.encode("[REF]", add_special_tokens=False)) == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"model_type": "unigram"}, "model_type is not BPE"),
        ({"normalization_rule_name": "nmt_nfkc"}, "normalizes characters"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"user_defined_symbols": ["ab"]}, "'ab' has the type USER_DEFINED"),
    ],
)
def test_what_a_sentencepiece_file_has_beyond_llamas_is_refused(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        tokenizer_json(llama2(tmp_path / "llama", **options))
    assert "tokenizer.json" in refused.value.cure


@pytest.mark.parametrize("name", find.OTHER_FORMS)
@pytest.mark.parametrize("data", [b"", b"{}", b"YQ== x", b"YQ== 1", b"\xff\xfe\x00", b"\x0a\x7f", b'{"config": 3}'])
def test_a_broken_file_is_named(tmp_path: Path, name: str, data: bytes) -> None:
    config = b'{"tokenizer_class": "TikTokenTokenizer"}'
    directory = checkpoint(tmp_path / "broken", **{name.replace(".", "__"): data, "tokenizer_config__json": config})
    with pytest.raises(ConfigError, match=name):
        TextTokenizer(directory)


def test_a_tiktoken_file_whose_pattern_is_not_known_is_refused(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    with pytest.raises(ConfigError, match="QWenTokenizer") as refused:
        tokenizer_json(kimi(tmp_path / "other", ranks, tokenizer_class="QWenTokenizer"))
    assert refused.value.allowed == ("TikTokenTokenizer",)


def test_a_converted_file_is_made_once_and_anew_when_a_source_changes(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    directory = kimi(tmp_path / "kimi", ranks)
    first = tokenizer_json(directory)
    written = first.stat().st_mtime_ns
    assert tokenizer_json(directory) == first
    assert first.stat().st_mtime_ns == written
    kimi(directory, ranks, added_tokens_decoder={})
    assert tokenizer_json(directory) != first


def test_a_tokenizer_json_is_used_before_any_other_form(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    directory = kimi(tmp_path / "both", ranks)
    (directory / "tokenizer.json").write_text((DEMO_MODELS / "llama" / "tokenizer.json").read_text())
    assert tokenizer_json(directory) == directory / "tokenizer.json"


def test_a_folder_that_others_may_write_is_not_used(
    tmp_path: Path, ranks: dict[bytes, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(find, "cache_places", lambda kind: iter([shared]))
    with pytest.raises(ConfigError, match="no place to keep it"):
        tokenizer_json(kimi(tmp_path / "kimi", ranks))


def test_a_user_without_a_home_keeps_converted_files_in_the_temporary_folder(
    tmp_path: Path, ranks: dict[bytes, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_such_user(_: int) -> None:
        raise KeyError

    monkeypatch.undo()
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_such_user)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    assert tokenizer_json(kimi(tmp_path / "kimi", ranks)).is_relative_to(tmp_path / "temporary")
