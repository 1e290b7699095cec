"""Converts tokenizer.model, the sentencepiece library's file, which Llama 2 and Mistral have. Pure."""

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from baton.models.loading.tokenizer_files.document import added_of_config, added_token, document, merges_of

_SPACE = "▁"
_MARKER = re.compile(r"\[\S+\]|<\S+>")
_BPE = 2
# Field numbers of sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _WHITESPACE_AS_SUFFIX, _BYTE_FALLBACK = 3, 24, 35
_BOS_ID, _EOS_ID = 41, 42
_CHARSMAP, _DUMMY_PREFIX, _REMOVE_SPACES, _ESCAPE_SPACES = 2, 3, 4, 5


class PieceType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class VocabularyPiece:
    text: str
    score: float
    type: PieceType


@dataclass(frozen=True)
class SentencePieceModel:
    """The file's content; `trainer` and `normalizer` hold the fields that are present, by number."""

    pieces: tuple[VocabularyPiece, ...]
    trainer: Mapping[int, int | bytes]
    normalizer: Mapping[int, int | bytes]


def read_model(data: bytes) -> SentencePieceModel:
    """Reads the file's bytes. Raises ValueError if they are no such file."""
    pieces: list[VocabularyPiece] = []
    specs: dict[int, dict[int, int | bytes]] = {_TRAINER: {}, _NORMALIZER: {}}
    try:
        for number, value in _fields(data):
            if number == _PIECES and isinstance(value, bytes):
                piece = dict(_fields(value))
                (score,) = struct.unpack("<f", piece.get(2, bytes(4)))
                text = piece[1]
                if not isinstance(text, bytes):
                    raise ValueError("the text of a piece is a number")
                pieces.append(VocabularyPiece(text.decode(), score, PieceType(piece.get(3, PieceType.NORMAL))))
            elif number in specs and isinstance(value, bytes):
                specs[number] = dict(_fields(value))
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise ValueError(f"it is not a sentencepiece file: {error}") from error
    if not pieces:
        raise ValueError("it is not a sentencepiece file: it has no pieces")
    return SentencePieceModel(tuple(pieces), specs[_TRAINER], specs[_NORMALIZER])


def convert(data: bytes, config: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """Makes tokenizer.json from a tokenizer.model.

    Args:
        config: tokenizer_config.json.
        added: added_tokens.json: ids by text.

    Raises:
        ValueError: the bytes are no such file, or use an unsupported feature, which the error names.
    """
    model = read_model(data)
    _check(model)
    vocab = {piece.text: number for number, piece in enumerate(model.pieces)}
    if len(vocab) != len(model.pieces):
        raise ValueError("two of its pieces are equal")
    normal = {piece.text: piece for piece in model.pieces if piece.type is PieceType.NORMAL}
    order = sorted(normal, key=lambda text: (-normal[text].score, vocab[text]))
    names = {number: piece.text for number, piece in enumerate(model.pieces) if piece.type in _SPECIAL}
    markers = {number: piece.text for number, piece in enumerate(model.pieces) if piece.type is PieceType.USER_DEFINED}
    tokens = {number: added_token(text, number) for number, text in names.items()}
    tokens |= {number: added_token(text, number, special=False) for number, text in markers.items()}
    tokens |= added_of_config(config, added)
    unknown = next((piece.text for piece in model.pieces if piece.type is PieceType.UNKNOWN), None)
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if model.normalizer.get(_DUMMY_PREFIX, 1) else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return document(
        vocab=vocab,
        merges=merges_of({text: vocab[text] for text in normal}, order),
        added=list(tokens.values()),
        bos=_around(model, names, _BOS_ID, 1) if config.get("add_bos_token", True) else None,
        eos=_around(model, names, _EOS_ID, 2) if config.get("add_eos_token", False) else None,
        model={"unk_token": unknown, "fuse_unk": True, "byte_fallback": bool(model.trainer.get(_BYTE_FALLBACK, 0))},
        normalizer={"type": "Sequence", "normalizers": [*prefix, replace]},
        decoder={"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
    )


_SPECIAL = (PieceType.UNKNOWN, PieceType.CONTROL)


def _check(model: SentencePieceModel) -> None:
    if model.trainer.get(_MODEL_TYPE, 1) != _BPE:
        raise ValueError("its model_type is not BPE")
    if model.trainer.get(_WHITESPACE_AS_SUFFIX, 0):
        raise ValueError("it has treat_whitespace_as_suffix")
    if model.normalizer.get(_CHARSMAP, b""):
        raise ValueError("it normalizes characters (precompiled_charsmap)")
    if model.normalizer.get(_REMOVE_SPACES, 1):
        raise ValueError("it has remove_extra_whitespaces")
    if not model.normalizer.get(_ESCAPE_SPACES, 1):
        raise ValueError("it has no escape_whitespaces")
    for piece in model.pieces:
        # NOTE: text after a marker gets the prefix space, as after every added token; sentencepiece gives it none.
        is_marker = piece.type is PieceType.USER_DEFINED and _MARKER.fullmatch(piece.text)
        if piece.type in (PieceType.USER_DEFINED, PieceType.UNUSED) and not is_marker:
            raise ValueError(f"its piece {piece.text[:40]!r} has the type {piece.type.name}")


def _around(model: SentencePieceModel, names: Mapping[int, str], field: int, default: int) -> tuple[str, int] | None:
    number = model.trainer.get(field, default)
    return (names[number], number) if isinstance(number, int) and number in names else None


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the fields of one protobuf message: number, and an integer or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        if at + size > len(data):
            raise ValueError("it ends within a field")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
    raise ValueError("a number is too long")
