"""One model's tokenizer: whole texts to token ids and back."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from baton.errors import ConfigError
from gateway.detokenizer import Detokenizer


class TextTokenizer:
    """One model's tokenizer.

    Raises:
        ConfigError: the file is missing, or is no tokenizer.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            cure = "give the directory of a checkpoint with its tokenizer.json"
            raise ConfigError(f"{path} does not exist", field="model", value=directory, cure=cure)
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # what the library raises for a file that it cannot read
            raise ConfigError(f"{path} is no tokenizer: {error}", field="model", value=directory) from error
        # NOTE: training leaves its own cutting and padding of examples in the file; both would change prompts unseen.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    # NOTE: the library's calls for one text hold the interpreter lock to their end, even in a thread; those for a batch
    # let go of it.

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the model expects around a prompt. Other threads run meanwhile."""
        return self._tokenizer.encode_batch_fast([text])[0].ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Other threads run meanwhile."""
        return self._tokenizer.decode_batch([token_ids], skip_special_tokens=True)[0]

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """For the output that follows this prompt."""
        return Detokenizer(self._tokenizer, prompt)
