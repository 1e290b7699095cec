"""The model that this gateway serves, from its directory: name, limits, tokenizer. No weights, no torch."""

from dataclasses import dataclass
from pathlib import Path

from baton.errors import InvalidRequest, UnknownModel
from gateway.text import TextCodec
from models.config.reader import read_config
from models.identity import config_digest


@dataclass(frozen=True)
class ServedModel:
    """What requests are checked against, and what nodes must serve too."""

    name: str
    architecture: str
    config_digest: str
    vocab_size: int
    max_context_tokens: int
    codec: TextCodec

    def check_name(self, name: str) -> None:
        """Raises:
        UnknownModel: another model is asked for; an empty name means this one.
        """
        if name not in ("", self.name):
            raise UnknownModel(f"model {name!r} is not served", field="model", value=name, allowed=(self.name,))

    def check_token_ids(self, field: str, token_ids: list[int]) -> None:
        """Raises:
        InvalidRequest: a token id is not in the vocabulary.
        """
        if token_ids and max(token_ids) >= self.vocab_size:
            wrong = next(token_id for token_id in token_ids if token_id >= self.vocab_size)
            raise InvalidRequest(
                f"{field} has token id {wrong}", field=field, value=wrong, allowed=(f"0 to {self.vocab_size - 1}",)
            )


def read_served_model(directory: Path, name: str | None) -> ServedModel:
    """Raises:
    ConfigError: the directory holds no model that we know, or no tokenizer.
    """
    config = read_config(directory)
    return ServedModel(
        name=name or directory.resolve().name,
        architecture=config.architecture,
        config_digest=config_digest(config),
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_context_tokens,
        codec=TextCodec(directory),
    )
