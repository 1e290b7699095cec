"""The bytes that each token of a vocabulary stands for."""

import json
import re
from collections.abc import Iterator

from tokenizers import Tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenPieces:
    """The bytes of one tokenizer's tokens, read from the kind of its decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        decoders = list(_decoders(json.loads(tokenizer.to_str())["decoder"]))
        kinds = {decoder["type"] for decoder in decoders}
        self._bytes = _byte_of_character() if "ByteLevel" in kinds else {}
        self._has_byte_pieces = "ByteFallback" in kinds
        self._spaces = _spaces(decoders)
        self._continued = next((str(decoder["prefix"]) for decoder in decoders if decoder["type"] == "WordPiece"), "")

    def token_bytes(self, token_id: int) -> bytes:
        """Empty for an id without token."""
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._bytes and all(character in self._bytes for character in piece):
            return bytes(self._bytes[character] for character in piece)
        if self._has_byte_pieces and (byte := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        if self._continued:
            piece = piece.removeprefix(self._continued) if piece.startswith(self._continued) else f" {piece}"
        for mark in self._spaces:
            piece = piece.replace(mark, " ")
        return piece.encode()

    @property
    def longest_bytes(self) -> int:
        """Upper limit of the bytes of one token."""
        return max(len(piece.encode()) for piece in self._tokenizer.get_vocab())


def _decoders(decoder: "dict[str, object] | None") -> "Iterator[dict[str, object]]":
    if decoder is None:
        return
    nested = decoder.get("decoders")
    if isinstance(nested, list):
        for each in nested:
            yield from _decoders(each)
    else:
        yield decoder


def _spaces(decoders: "list[dict[str, object]]") -> tuple[str, ...]:
    """What pieces have in place of a space."""
    marks = [str(decoder["replacement"]) for decoder in decoders if decoder["type"] == "Metaspace"]
    for decoder in decoders:
        pattern = decoder.get("pattern")
        if decoder["type"] == "Replace" and decoder.get("content") == " " and isinstance(pattern, dict):
            marks += [str(pattern["String"])] if "String" in pattern else []
    return tuple(marks)


def _byte_of_character() -> dict[str, int]:
    """The characters by which byte-level pieces stand for bytes: printable ones for themselves, then from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
