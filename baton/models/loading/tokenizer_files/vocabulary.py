"""A digest of a tokenizer's vocabulary, by which gateways and nodes see that they have different tokenizers."""

import hashlib
import json
from pathlib import Path
from typing import Any

from baton.core.errors import ConfigError
from baton.models.config.file import read_regular


def vocabulary_digest(tokenizer_json: Path) -> str:
    """Returns the SHA-256, in hex, over the tokens that texts consist of, in the order of their ids.

    Added tokens are left out: copies of one model name them differently. Returns "" if the file cannot be read, or has
    another form.
    """
    try:
        values = json.loads(read_regular(tokenizer_json))
        tokens = _tokens(values["model"]["vocab"])
        added = {int(token["id"]) for token in values.get("added_tokens") or ()}
    except (ConfigError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""
    ordinary = [[token_id, token] for token_id, token in sorted(tokens.items()) if token_id not in added]
    return hashlib.sha256(json.dumps(ordinary).encode()).hexdigest()


def _tokens(vocab: Any) -> dict[int, str]:
    """The tokens by id: of a list of tokens with scores (Unigram), or of ids by token."""
    if isinstance(vocab, list):
        return {token_id: str(token) for token_id, (token, _) in enumerate(vocab)}
    return {int(token_id): token for token, token_id in vocab.items()}
