"""The digest of a vocabulary is equal for equal tokens, however the file spells them, and for nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.models.loading.tokenizer_files.vocabulary import vocabulary_digest

TOKENS = {"a": 0, "b": 1, "ab": 2}
END = {"id": 3, "content": "</s>"}


def digest_of(folder: Path, vocab: object, *added: dict[str, Any], **model: object) -> str:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({"added_tokens": added, "model": {"vocab": vocab, **model}}))
    return vocabulary_digest(path)


def test_every_spelling_of_the_same_tokens_has_the_same_digest(tmp_path: Path) -> None:
    usual = digest_of(tmp_path, TOKENS)
    assert len(usual) == 64
    assert digest_of(tmp_path, dict(reversed(TOKENS.items())), type="BPE", merges=["a b"]) == usual
    assert digest_of(tmp_path, [["a", 0.0], ["b", -1.5], ["ab", -2.0]]) == usual  # Unigram
    # Copies of a model name added tokens differently, within the vocabulary or outside of it.
    assert digest_of(tmp_path, TOKENS, END) == digest_of(tmp_path, {**TOKENS, "<|im_end|>": 3}, END) == usual


def test_other_tokens_or_other_ids_have_another_digest(tmp_path: Path) -> None:
    others = [TOKENS, {"a": 1, "b": 0, "ab": 2}, {"a": 0, "b": 1, "ba": 2}, {**TOKENS, "c": 3}]
    assert len({digest_of(tmp_path, vocab) for vocab in others}) == len(others)


@pytest.mark.parametrize("content", [None, "", "[]", '{"model": {"vocab": 7}}', '{"model": {"vocab": {"a": null}}}'])
def test_a_file_without_a_vocabulary_has_no_digest(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    assert vocabulary_digest(tmp_path / "tokenizer.json") == ""
