"""A tokenizer of many tokens, made from this repository's own text."""

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS, EOS_ID = "<|endoftext|>", 0
_ROOT = Path(__file__).resolve().parent.parent.parent
# Text of about 2 MiB gives enough words.
_TEXT_BYTES = 2 << 20


def wide_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of this many tokens: words of this repository, and compounds of two of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    merges = [tuple(pair) for pair in model["merges"]]
    words = [token for token, _ in sorted(vocab.items(), key=lambda item: item[1]) if len(token) > 1 and token != EOS]
    letters = [word for word in words if word.isascii() and word.isalpha()]
    for first, second in ((first, second) for second in letters for first in words[:512]):
        if len(vocab) == vocab_size:
            break
        if first + second not in vocab:
            vocab[first + second] = len(vocab)
            merges.append((first, second))
    wide = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    wide.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    wide.decoder = decoders.ByteLevel()
    wide.add_special_tokens([EOS])
    return wide


def _texts() -> Iterator[str]:
    left = _TEXT_BYTES
    for folder in ("baton", "engine", "gateway", "models", "docs", "node", "kvtransfer", "tests"):
        for path in sorted((_ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md") and left > 0:
                text = path.read_text(encoding="utf-8")
                left -= len(text)
                yield text
