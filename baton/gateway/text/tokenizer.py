"""One model's tokenizer: whole texts to token ids and back."""

import logging
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from baton.core.errors import ConfigError, shortened
from baton.gateway.text.control_tokens import with_aliases
from baton.gateway.text.detokenizer import Detokenizer, byte_tokens, token_texts
from baton.gateway.text.text_pieces import PieceEncoder
from baton.gateway.text.token_pieces import TokenPieces
from baton.models.loading.tokenizer_files.find import OTHER_FORMS, tokenizer_json

log = logging.getLogger("baton")

_IDS_MAX = 1 << 20  # as a model's vocabulary; tables are as long as the largest id


class TextTokenizer:
    """One model's tokenizer.

    Args:
        special_in_texts: whether the names of special tokens in a text are these tokens. Otherwise they are text, and
            `aliases` are names by which the gateway's own texts have them.

    Raises:
        ConfigError: the file is missing, is no tokenizer, or has no tokens.
    """

    def __init__(self, directory: Path, *, special_in_texts: bool = True) -> None:
        path = tokenizer_json(directory)
        if not path.is_file():
            cure = f"give the directory of a checkpoint with its tokenizer.json, {', '.join(OTHER_FORMS)}"
            raise ConfigError(f"{path} does not exist", field="model", value=directory, cure=cure)
        try:
            # NOTE: the library opens no path that is not UTF-8.
            self._tokenizer = Tokenizer.from_buffer(path.read_bytes())
        except BaseException as error:  # what the library raises for a file that it cannot read, its panics included
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise ConfigError(f"{path} is not a tokenizer: {error}", field="model", value=directory) from error
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        if not ids or max(ids) >= _IDS_MAX:
            what = f"has token id {max(ids)}" if ids else "has no tokens"
            allowed = (f"ids below {_IDS_MAX}",)
            raise ConfigError(f"{path} {what}", field="model", value=directory, allowed=allowed)
        self._path = path
        # NOTE: a file may carry its training's truncation and padding; both would change prompts silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        try:
            encoding, self.aliases = (self._tokenizer, {}) if special_in_texts else with_aliases(self._tokenizer)
            self._encoder = PieceEncoder(encoding)  # which tries it
        except ConfigError:
            raise
        except BaseException as error:  # as above
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise ConfigError(f"{path} cannot encode: {error}", field="model", value=directory) from error
        self._pieces = TokenPieces(self._tokenizer)
        self._texts = {skip: token_texts(self._tokenizer, skip_special_tokens=skip) for skip in (True, False)}
        self._byte_tokens = {skip: byte_tokens(self._tokenizer, skip_special_tokens=skip) for skip in (True, False)}
        self.longest_token_bytes = max(self._pieces.longest_bytes, *map(len, self.aliases.values()), 0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Checks that texts become tokens of the model. Publishers add special tokens beyond its vocabulary, for parts
        such as images that the model at hand does not have: those are logged, and refused in requests.

        Raises:
            ConfigError: other tokens are beyond it.
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
                cure="take config.json and tokenizer.json of one revision of one model",
            )
        if beyond:
            names = shortened(", ".join(repr(beyond[token_id]) for token_id in sorted(beyond)), 200)
            log.warning("special tokens beyond the model's vocabulary of %d tokens: %s", vocab_size, names)

    def encode(self, text: str, *, add_special_tokens: bool = True, salt: str = "") -> list[int]:
        """Token ids. Releases the interpreter lock.

        Args:
            add_special_tokens: whether to add those that the model expects around a prompt.
            salt: texts are cached for the same salt only.
        """
        return self._encoder.encode(text, add_special_tokens=add_special_tokens, salt=salt)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text. Releases the interpreter lock."""
        # NOTE: as in `baton.gateway.text.text_pieces`, only a batch releases it.
        return self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        """A detokenizer for the output that follows this prompt."""
        return Detokenizer(
            self._tokenizer,
            prompt,
            skip_special_tokens=skip_special_tokens,
            texts=self._texts[skip_special_tokens],
            byte_tokens=self._byte_tokens[skip_special_tokens],
        )

    def text_after(self, *, is_prompt: bool, skip_special_tokens: bool) -> Detokenizer:
        """Makes the text of tokens that begin a prompt, or that follow some word."""
        before = [] if is_prompt else self._encoder.encode("a", add_special_tokens=False, salt="")
        return self.detokenizer(before, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for in a text; of a special token those of its name; none for no token."""
        return self._pieces.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """As `token_bytes`, for display: bytes that are no whole characters are replaced."""
        return self.token_bytes(token_id).decode("utf-8", "replace")
