"""Turns one output's token ids into text token by token, without ever returning half a character.

`tokenizers.decoders.DecodeStream` (0.23) is not used: it never returns invalid bytes, cannot return an unfinished
character at the end, and slows down with every token of a run of such bytes (mean over 4,000: 850 us).
"""

import codecs
import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"

# Number of prompt tokens decoded before the output: whether a word piece begins with a space depends on its
# neighbour.
_CONTEXT_TOKENS = 6
_CHARACTER_TOKENS_MAX = 4

# An unfinished character is one replacement character, or up to three where a decoder replaces byte by byte. More
# replacement characters, over this many tokens, are invalid bytes, and are shown as such.
_UNFINISHED_CHARACTERS_MAX = 3
_HELD_TOKENS_MAX = 16

# Bounds the cost of a push: tokens without text, or tokens that all end within characters, keep the window growing.
_WINDOW_TOKENS_MAX = 256


def decoder_of(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Returns the entry `decoder` of tokenizer.json.

    Only the decoder is written: the whole file of a tokenizer with 262,144 tokens takes over a second.
    """
    if tokenizer.decoder is None:
        return None
    entry: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return entry


class TokenTexts(dict[int, str | None]):
    """Texts of single tokens of a byte-level vocabulary, where they do not depend on neighbours.

    The text is None for a token that contains part of a character, because it then depends on its neighbours.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    def __missing__(self, token_id: int) -> str | None:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=self._skip_special_tokens)
        self[token_id] = known = None if _REPLACEMENT in text else text
        return known


def token_texts(tokenizer: Tokenizer, *, skip_special_tokens: bool) -> TokenTexts | None:
    """Returns the texts of single tokens. Returns None if all tokens' texts may depend on their neighbours."""
    decoder = decoder_of(tokenizer)
    if decoder is None or decoder["type"] != "ByteLevel":
        return None
    return TokenTexts(tokenizer, skip_special_tokens=skip_special_tokens)


class ByteTokens:
    """The tokens of a byte-fallback vocabulary that stand for one byte each.

    The decoder joins neighbouring byte tokens: to text if they are valid UTF-8, else to a replacement character for
    each byte. So their text is known only once another token follows.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        named = {tokenizer.token_to_id(f"<0x{byte:02X}>"): bytes((byte,)) for byte in range(256)}
        self._bytes: dict[int, bytes] = {number: byte for number, byte in named.items() if number is not None}
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        self._skipped = frozenset(number for number, token in added if token.special and skip_special_tokens)

    def byte(self, token_id: int) -> bytes | None:
        """Returns a token's byte; b"" for a token without text, which does not end a run of bytes; else None."""
        byte = self._bytes.get(token_id)
        if byte is None and (token_id in self._skipped or self._tokenizer.id_to_token(token_id) is None):
            return b""
        return byte


def byte_tokens(tokenizer: Tokenizer, *, skip_special_tokens: bool) -> ByteTokens | None:
    """Returns the byte tokens. Returns None if the decoder has no byte fallback."""
    if '"type":"ByteFallback"' not in json.dumps(decoder_of(tokenizer), separators=(",", ":")):
        return None
    return ByteTokens(tokenizer, skip_special_tokens=skip_special_tokens)


class _Run:
    """A run of neighbouring byte tokens, and its text if no other byte follows."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._valid = True

    def add(self, byte: bytes) -> None:
        if self._valid:
            try:
                self._text += self._decoder.decode(byte)
            except UnicodeDecodeError:
                self._valid = False

    @property
    def text(self) -> str:
        """The run's text; empty if the bytes are not valid or the last character is incomplete."""
        return self._text if self._valid and not self._decoder.getstate()[0] else ""


class Detokenizer:
    """Detokenizes one output. A push decodes only a few tokens, however long the output is.

    The texts of all pushes and of `finish`, joined, equal the text of all tokens decoded at once.

    Tokens are decoded in a window that begins after a whole character and includes some earlier tokens, because some
    decoders look at neighbours. Text that ends in replacement characters may be an incomplete character, so it is held
    back until later tokens decide.

    Args:
        texts: result of `token_texts` for this tokenizer; the window is then empty while all characters are whole.
        byte_tokens: result of `byte_tokens` for this tokenizer; their text is held back until another token follows.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        texts: TokenTexts | None = None,
        byte_tokens: ByteTokens | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._byte_tokens = byte_tokens
        self._run: _Run | None = None
        self._skip_special_tokens = skip_special_tokens
        self._texts = texts
        self._window = self._context(prompt)
        self._whole = len(self._window)  # tokens of the window up to the last whole character
        text = self._decode(self._window)
        self._given = len(text.rstrip(_REPLACEMENT))  # characters of the window's text
        if texts is not None and self._given == len(text):
            self._slide()

    def push(self, *token_ids: int) -> str:
        """Returns what the tokens add to the text; empty while a character is unfinished."""
        texts = self._texts
        pieces = []
        for token_id in token_ids:
            text = None if texts is None or self._window else texts[token_id]
            pieces.append(self._push(token_id) if text is None else text)
        return "".join(pieces)

    @property
    def held(self) -> str:
        """Valid text of byte tokens that `push` holds back. It will be returned unless an invalid byte follows."""
        return "" if self._run is None else self._run.text

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        if self._byte_tokens is not None:
            byte = self._byte_tokens.byte(token_id)
            if byte is not None:
                self._hold(byte)
                return ""
            self._run = None
        text = self._decode(self._window)
        stable = text if self._byte_tokens is not None else text.rstrip(_REPLACEMENT)
        unfinished = len(text) - len(stable)
        if unfinished and self._is_no_text(unfinished):
            stable, unfinished = text, 0
        delta = stable[self._given :]
        self._given = max(self._given, len(stable))
        if not unfinished and (delta or len(self._window) > _WINDOW_TOKENS_MAX):
            self._slide()
        return delta

    def finish(self) -> str:
        """Ends the output, and returns the text that was held back."""
        self._run = None
        text = self._decode(self._window)
        delta = text[self._given :]
        self._given = max(self._given, len(text))
        return delta

    def _hold(self, byte: bytes) -> None:
        if self._run is None:
            if not byte:
                return
            self._run = _Run()
        self._run.add(byte)

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """Returns the prompt's last tokens, starting at the beginning of a character if possible."""
        sizes = range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _CHARACTER_TOKENS_MAX)
        ends = [list(prompt[-size:]) for size in sizes]
        return min(ends, key=lambda end: self._decode(end).count(_REPLACEMENT))

    def _is_no_text(self, unfinished: int) -> bool:
        held = len(self._window) - self._whole
        return held > _WINDOW_TOKENS_MAX or (unfinished > _UNFINISHED_CHARACTERS_MAX and held > _HELD_TOKENS_MAX)

    def _slide(self) -> None:
        """Moves the window's beginning to the last whole character. Call it only while all characters are whole."""
        if self._texts is not None:
            self._window, self._whole, self._given = [], 0, 0
            return
        self._window = self._window[self._whole :]
        self._whole = len(self._window)
        self._given = len(self._decode(self._window))

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
