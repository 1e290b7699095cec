"""One model's tokenizer: whole texts to token ids and back."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from baton.config import tokenizer_file
from baton.errors import ConfigError
from gateway.detokenizer import Detokenizer, token_texts
from gateway.text_pieces import PieceEncoder
from gateway.token_pieces import TokenPieces


class TextTokenizer:
    """One model's tokenizer.

    Raises:
        ConfigError: the file is missing, or is no tokenizer.
    """

    def __init__(self, directory: Path) -> None:
        path = tokenizer_file(directory)
        if not path.is_file():
            cure = "give the directory of a checkpoint with its tokenizer.json"
            raise ConfigError(f"{path} does not exist", field="model", value=directory, cure=cure)
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # what the library raises for a file that it cannot read
            raise ConfigError(f"{path} is not a tokenizer: {error}", field="model", value=directory) from error
        # NOTE: a file may carry its training's truncation and padding; both would change prompts silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._encoder = PieceEncoder(self._tokenizer)
        self._pieces = TokenPieces(self._tokenizer)
        self._texts = {skip: token_texts(self._tokenizer, skip_special_tokens=skip) for skip in (True, False)}
        self.longest_token_bytes = self._pieces.longest_bytes

    def encode(self, text: str, *, add_special_tokens: bool = True, salt: str = "") -> list[int]:
        """Token ids. Releases the interpreter lock.

        Args:
            add_special_tokens: whether to add those that the model expects around a prompt.
            salt: texts are cached for the same salt only.
        """
        return self._encoder.encode(text, add_special_tokens=add_special_tokens, salt=salt)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text. Releases the interpreter lock."""
        # NOTE: as in `gateway.text_pieces`, only a batch releases it.
        return self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def detokenizer(self, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        """A detokenizer for the output that follows this prompt."""
        texts = self._texts[skip_special_tokens]
        return Detokenizer(self._tokenizer, prompt, skip_special_tokens=skip_special_tokens, texts=texts)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for in a text; of a special token those of its name; none for no token."""
        return self._pieces.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """As `token_bytes`, for display: bytes that are no whole characters are replaced."""
        return self.token_bytes(token_id).decode("utf-8", "replace")
