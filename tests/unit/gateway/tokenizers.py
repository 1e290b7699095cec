"""Two small tokenizers of the kinds that models use: byte-level pieces, and characters with bytes to fall back on."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = ("the quick brown fox jumps over the lazy dog", "naïve café 日本語 日本 €€ 😀😀", "int main() { return 0; }")


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<bos>", "<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", token_id(tokenizer, "<bos>"))]
    )
    return tokenizer


def byte_fallback() -> Tokenizer:
    letters = sorted({letter for text in TEXTS[:1] for letter in text if letter != " "})
    pieces = ["<unk>", "<bos>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    return tokenizer


def token_id(tokenizer: Tokenizer, piece: str) -> int:
    """The number of a piece that the tokenizer has."""
    number: int | None = tokenizer.token_to_id(piece)
    assert number is not None
    return number
