"""Makes tokenizer.json, tokenizer_config.json and chat templates from the metadata of a GGUF file."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any

from baton.models.checkpoint.gguf_header import GgufHeader
from baton.models.loading.gguf.config import Metadata
from baton.models.loading.tokenizer_files.document import added_token, document, merges_of

_SPACE = "▁"
_NAMED = MappingProxyType(
    {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding", "sep_token": "seperator"}
)
_TEMPLATE = "tokenizer.chat_template"
_TEMPLATE_NAME = re.compile(r"[\w-]{1,64}", re.ASCII)
_TOKENS_MAX = 1 << 20


class _Kind(IntEnum):
    """The kinds of tokens in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _Split:
    """How a text is cut before pairs are merged.

    Attributes:
        pattern: each match is a part; None: GPT-2's own parts.
        digits: each digit is a part.
        whole_words: a part that is a token is taken as it is.
        begins: prompts begin with `bos_token`, unless the file says otherwise.
        nfc: texts are normalized first.
    """

    pattern: str | None = None
    digits: bool = False
    whole_words: bool = False
    begins: bool = False
    nfc: bool = False


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _Split(
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}",
    whole_words=True,
    begins=True,
)
_QWEN2 = _Split(rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}", nfc=True)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = _Split(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}",
    whole_words=True,
    begins=True,
)
# By `tokenizer.ggml.pre`.
_SPLITS: Mapping[str, _Split] = MappingProxyType(
    {
        "gpt-2": _Split(),
        "smollm": _Split(digits=True),
        "starcoder": _Split(digits=True),
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "llama-bpe": _LLAMA3,
        "pixtral": _LLAMA3,
        "falcon3": _LLAMA3,
        "qwen2": _QWEN2,
        "deepseek-r1-qwen": _QWEN2,
        "tekken": _TEKKEN,
    }
)


@dataclass(frozen=True)
class TokenizerFiles:
    """The contents of the files; `templates` by name, "default" for the template without a name."""

    tokenizer: dict[str, Any]
    config: dict[str, Any]
    templates: Mapping[str, str]


def tokenizer_files(header: GgufHeader) -> TokenizerFiles:
    """Returns the files' contents.

    Raises:
        ConfigError: the metadata are damaged, or the file has a tokenizer that Baton does not know.
    """
    metadata = Metadata(header)
    kind = metadata.text("tokenizer.ggml.model")
    vocabulary = _Vocabulary(metadata)
    if kind == "gpt2":
        split = _split_of(metadata)
        begins, tokenizer = split.begins, _byte_pairs(vocabulary, split, metadata.texts("tokenizer.ggml.merges"))
    elif kind == "llama":
        begins, tokenizer = True, _sentencepiece(vocabulary, metadata)
    else:
        cure = "give the original checkpoint, by directory or name on the hub"
        raise metadata.refuse("tokenizer.ggml.model", "gpt2", "llama", cure=cure)
    bos, eos = vocabulary.named("bos"), vocabulary.named("eos")
    around = document(
        vocab={},
        merges=(),
        added=(),
        bos=bos if metadata.flag("tokenizer.ggml.add_bos_token", begins) else None,
        eos=eos if metadata.flag("tokenizer.ggml.add_eos_token", False) else None,
        model={},
    )
    config = {name: named[0] for name, key in _NAMED.items() if (named := vocabulary.named(key)) is not None}
    return TokenizerFiles({**tokenizer, "post_processor": around["post_processor"]}, config, _templates(metadata))


class _Vocabulary:
    """The tokens of a file with their kinds and scores."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self.tokens = list(metadata.texts("tokenizer.ggml.tokens"))
        if not 0 < len(self.tokens) <= _TOKENS_MAX:
            raise metadata.refuse("tokenizer.ggml.tokens", f"a list of 1 to {_TOKENS_MAX} texts")
        self.scores = self._for_each("scores", 0.0)
        kinds = self._for_each("token_type", int(_Kind.NORMAL))
        if not set(kinds) <= set(_Kind):
            raise metadata.refuse("tokenizer.ggml.token_type", "numbers from 1 to 6")
        self.kinds = [_Kind(int(kind)) for kind in kinds]

    def _for_each(self, name: str, default: float) -> tuple[float, ...]:
        values = self._metadata.numbers(f"tokenizer.ggml.{name}") or (default,) * len(self.tokens)
        if len(values) != len(self.tokens) or any(value != value for value in values):
            raise self._metadata.refuse(f"tokenizer.ggml.{name}", f"a number for each of {len(self.tokens)} tokens")
        return values

    def ids(self, *, without: _Kind | None = None) -> dict[str, int]:
        """Returns the ids of the tokens, without one kind."""
        found: dict[str, int] = {}
        for number, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)):
            if kind is without:
                continue
            if token in found:
                raise self._metadata.refuse("tokenizer.ggml.tokens", f"different texts, not two of {token[:40]!r}")
            found[token] = number
        return found

    def added(self) -> list[dict[str, Any]]:
        """Returns the tokens that texts name whole."""
        special = (_Kind.CONTROL, _Kind.UNKNOWN)
        return [
            added_token(token, number, special=kind in special)
            for number, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind in special or (kind is _Kind.USER_DEFINED and token.strip(_SPACE))
        ]

    def named(self, name: str) -> tuple[str, int] | None:
        """Returns a token that the file names, such as `bos`, with its id."""
        number = self._metadata.token_id(f"{name}_token_id")
        if number is None:
            return None
        if not 0 <= number < len(self.tokens):
            allowed = f"0 to {len(self.tokens) - 1}"
            raise self._metadata.refuse(f"tokenizer.ggml.{name}_token_id", allowed)
        return self.tokens[number], number


def _split_of(metadata: Metadata) -> _Split:
    key = "tokenizer.ggml.pre"
    split = _SPLITS.get(metadata.text(key))
    if split is None:
        cure = "give the original checkpoint, by directory or name on the hub"
        raise metadata.refuse(key, *_SPLITS, cure=cure)
    return split


def _byte_pairs(vocabulary: _Vocabulary, split: _Split, merges: tuple[str, ...]) -> dict[str, Any]:
    # Rows of the embedding without a token have names such as [PAD151936].
    vocab = vocabulary.ids(without=_Kind.UNUSED)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges) if left and right]
    pieces: list[dict[str, Any]] = []
    if split.digits:
        pieces.append({"type": "Digits", "individual_digits": True})
    if split.pattern is not None:
        pattern = {"Regex": split.pattern}
        pieces.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split.pattern is None}
    return document(
        vocab=vocab,
        merges=pairs,
        added=vocabulary.added(),
        model={"fuse_unk": False, "byte_fallback": False, "ignore_merges": split.whole_words},
        normalizer={"type": "NFC"} if split.nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*pieces, level]},
        decoder={**level, "use_regex": True},
    )


def _sentencepiece(vocabulary: _Vocabulary, metadata: Metadata) -> dict[str, Any]:
    # Runs of spaces have spaces in these files, and the mark of a space in the original.
    vocabulary.tokens = [
        _SPACE * len(token) if kind is _Kind.USER_DEFINED and not token.strip(" ") else token
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    ]
    vocab = vocabulary.ids()
    kinds, scores = vocabulary.kinds, vocabulary.scores
    runs = [token for token, number in vocab.items() if kinds[number] is _Kind.USER_DEFINED and not token.strip(_SPACE)]
    normal = [token for token, number in vocab.items() if kinds[number] is _Kind.NORMAL]
    order = [*runs, *sorted(normal, key=lambda token: (-scores[vocab[token]], vocab[token]))]
    unknown = next((token for token, number in vocab.items() if kinds[number] is _Kind.UNKNOWN), None)
    named = vocabulary.named("unknown")
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return document(
        vocab=vocab,
        merges=merges_of({token: vocab[token] for token in order}, order),
        added=vocabulary.added(),
        model={
            "unk_token": unknown if named is None else named[0],
            "fuse_unk": True,
            "byte_fallback": _Kind.BYTE in kinds,
        },
        normalizer={
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": _SPACE}] if prefix else []), replace],
        },
        decoder={"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
    )


def _templates(metadata: Metadata) -> dict[str, str]:
    """Returns the chat templates by name; names that could be no file's are left out."""
    templates = {"default": metadata.text(_TEMPLATE)} if metadata.raw(_TEMPLATE) is not None else {}
    for name in metadata.texts("tokenizer.chat_templates"):
        if _TEMPLATE_NAME.fullmatch(name) and metadata.raw(f"{_TEMPLATE}.{name}") is not None:
            templates[name] = metadata.text(f"{_TEMPLATE}.{name}")
    return templates
