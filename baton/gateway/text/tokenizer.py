"""One model's tokenizer: converts whole texts to token ids and back."""

import json
import logging
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from baton.core.errors import ConfigError, shortened
from baton.gateway.text.detokenizer import Detokenizer, byte_tokens, decoder_of, token_texts
from baton.gateway.text.text_pieces import PieceEncoder
from baton.models.loading.tokenizer_files.find import OTHER_FORMS, tokenizer_json

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
log = logging.getLogger("baton")

_IDS_MAX = 1 << 20  # the limit of a model's vocabulary too; tables are as long as the largest id


class TextTokenizer:
    """One model's tokenizer.

    Args:
        special_in_texts: whether names of special tokens in a text become these tokens. Otherwise the names stay text,
            and only the secret names in `aliases`, which the gateway writes, become special tokens.

    Raises:
        ConfigError: the file is missing, is not a tokenizer, or has no tokens.
    """

    def __init__(self, directory: Path, *, special_in_texts: bool = True) -> None:
        path = tokenizer_json(directory)
        if not path.is_file():
            cure = f"give the directory of a checkpoint with its tokenizer.json, {', '.join(OTHER_FORMS)}"
            raise ConfigError(f"{path} does not exist", field="model", value=directory, cure=cure)
        try:
            # NOTE: the library cannot open a path that is not UTF-8.
            self._tokenizer = Tokenizer.from_buffer(path.read_bytes())
        except BaseException as error:  # the library's panics are BaseExceptions
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise ConfigError(f"{path} is not a tokenizer: {error}", field="model", value=directory) from error
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        if not ids or max(ids) >= _IDS_MAX:
            what = f"has token id {max(ids)}" if ids else "has no tokens"
            allowed = (f"ids below {_IDS_MAX}",)
            raise ConfigError(f"{path} {what}", field="model", value=directory, allowed=allowed)
        self._path = path
        # NOTE: a file may contain truncation and padding from training; both would silently change prompts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        try:
            encoding, self.aliases = (self._tokenizer, {}) if special_in_texts else with_aliases(self._tokenizer)
            self._encoder = PieceEncoder(encoding)  # encodes a text
            self._pairs = encoding
        except ConfigError:
            raise
        except BaseException as error:  # see above
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise ConfigError(f"{path} cannot encode: {error}", field="model", value=directory) from error
        self._pieces = TokenPieces(self._tokenizer)
        self._texts = {skip: token_texts(self._tokenizer, skip_special_tokens=skip) for skip in (True, False)}
        self._byte_tokens = {skip: byte_tokens(self._tokenizer, skip_special_tokens=skip) for skip in (True, False)}
        self.longest_token_bytes = max(self._pieces.longest_bytes, *map(len, self.aliases.values()), 0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Checks that all ordinary tokens are in the model's vocabulary.

        Some tokenizers have special tokens beyond it, for inputs such as images that the model does not take. These are
        logged, and refused in requests.

        Raises:
            ConfigError: an ordinary token is beyond the vocabulary.
        """
        added = self._tokenizer.get_added_tokens_decoder()
        beyond = {
            token_id: token
            for token, token_id in self._tokenizer.get_vocab(with_added_tokens=True).items()
            if token_id >= vocab_size
        }
        ordinary = sorted(beyond.keys() - added.keys())
        if ordinary:
            raise ConfigError(
                f"{self._path} has {len(ordinary)} token(s) beyond the model's vocabulary, such as "
                f"{shortened(beyond[ordinary[0]], 40)!r} with id {ordinary[0]}",
                field="model",
                value=ordinary[0],
                allowed=(f"0 to {vocab_size - 1}",),
                cure="use config.json and tokenizer.json of the same revision of one model",
            )
        if beyond:
            names = shortened(", ".join(repr(beyond[token_id]) for token_id in sorted(beyond)), 200)
            log.warning("special tokens beyond the model's vocabulary of %d tokens: %s", vocab_size, names)

    def encode(self, text: str, *, add_special_tokens: bool = True, salt: str = "") -> list[int]:
        """Returns a text's token ids. Releases the interpreter lock.

        Args:
            add_special_tokens: add the special tokens that the model expects around a prompt.
            salt: only texts with the same salt share cached pieces.
        """
        return self._encoder.encode(text, add_special_tokens=add_special_tokens, salt=salt)

    def encode_own(self, text: str) -> list[int]:
        """Returns the token ids of a text of ours, in which the names of special tokens take effect."""
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Returns the token ids of a pair of texts, with the special tokens that the model expects between them."""
        # NOTE: see `decode` for why this is a call for a batch.
        return list(self._pairs.encode_batch_fast([(first, second)], add_special_tokens=True)[0].ids)

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token by its exact name. Returns None if there is none."""
        return self._tokenizer.token_to_id(token)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids. Releases the interpreter lock."""
        # NOTE: the library releases the lock only in calls for a batch.
        return self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        """Returns a detokenizer for the output that follows this prompt."""
        return Detokenizer(
            self._tokenizer,
            prompt,
            skip_special_tokens=skip_special_tokens,
            texts=self._texts[skip_special_tokens],
            byte_tokens=self._byte_tokens[skip_special_tokens],
        )

    def text_after(self, *, is_prompt: bool, skip_special_tokens: bool) -> Detokenizer:
        """Returns a detokenizer for tokens that begin a prompt, or that follow some word."""
        before = [] if is_prompt else self._encoder.encode("a", add_special_tokens=False, salt="")
        return self.detokenizer(before, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns a token's bytes in a text. Of a special token, returns its name's; of an unknown id, b""."""
        return self._pieces.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """Returns a token's text for display. Bytes that are not whole characters are replaced."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


class TokenPieces:
    """The bytes of one tokenizer's tokens, derived from its decoder's type."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        decoders = list(_decoders(decoder_of(tokenizer)))
        kinds = {decoder["type"] for decoder in decoders}
        self._bytes = _byte_of_character() if "ByteLevel" in kinds else {}
        self._has_byte_pieces = "ByteFallback" in kinds
        self._spaces = _spaces(decoders)
        self._continued = next((str(decoder["prefix"]) for decoder in decoders if decoder["type"] == "WordPiece"), "")

    def token_bytes(self, token_id: int) -> bytes:
        """Returns a token's bytes; empty for an unknown id."""
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
        """Upper bound of the bytes of one token."""
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
    """Returns the marks that stand for a space in vocabulary pieces."""
    marks = [str(decoder["replacement"]) for decoder in decoders if decoder["type"] == "Metaspace"]
    for decoder in decoders:
        pattern = decoder.get("pattern")
        if decoder["type"] == "Replace" and decoder.get("content") == " " and isinstance(pattern, dict):
            marks += [str(pattern["String"])] if "String" in pattern else []
    return tuple(marks)


def _byte_of_character() -> dict[str, int]:
    """Maps the characters of byte-level pieces to bytes: printable ones to themselves, others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def with_aliases(tokenizer: Tokenizer) -> tuple[Tokenizer, Mapping[str, str]]:
    """Returns a tokenizer with secret names for its special tokens, and these names by the tokens' own names.

    Raises:
        ConfigError: a special token is recognized only in some places, such as between spaces.
    """
    content = json.loads(tokenizer.to_str())
    special = [token for token in content["added_tokens"] if token["special"]]
    secret = secrets.token_hex(16)
    # Only letters and digits, because normalizers may change other characters.
    aliases = {token["content"]: f"{secret}x{token['id']}x" for token in special}
    for token in special:
        token["content"] = aliases[token["content"]]
    _rename(content["model"], aliases)
    renamed = Tokenizer.from_str(json.dumps(content))
    found = set(renamed.encode("a".join(("", *aliases.values(), "")), add_special_tokens=False).ids)
    for name, token in zip(aliases, special, strict=True):
        if token["id"] not in found:
            raise ConfigError(
                f"the tokenizer recognizes its special token {name!r} only in some places",
                field="user_special_tokens",
                value="text",
                allowed=("allow",),
                cure="this tokenizer cannot keep special tokens in clients' texts from taking effect",
            )
    return renamed, aliases


def _rename(model: dict[str, Any], aliases: Mapping[str, str]) -> None:
    """Renames special tokens in the model's vocabulary, which would otherwise find them in ordinary text."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {aliases.get(piece, piece): number for piece, number in vocabulary.items()}
    elif isinstance(vocabulary, list):  # Unigram's, with scores
        model["vocab"] = [[aliases.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in aliases:
        model["unk_token"] = aliases[model["unk_token"]]
    if model.get("merges"):
        merges = [(merge, merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"]]
        model["merges"] = [merge for merge, pair in merges if not aliases.keys() & {*pair, "".join(pair)}]
