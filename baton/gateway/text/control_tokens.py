"""A tokenizer that knows its special tokens by secret names only, so that no text of a client has one.

Everything else of it is unchanged: a special token's own name is encoded like any other text.
"""

import json
import secrets
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from baton.core.errors import ConfigError


def with_aliases(tokenizer: Tokenizer) -> tuple[Tokenizer, Mapping[str, str]]:
    """The tokenizer, and the secret names of its special tokens by their own.

    Raises:
        ConfigError: a special token counts in some places only, such as between spaces.
    """
    content = json.loads(tokenizer.to_str())
    special = [token for token in content["added_tokens"] if token["special"]]
    secret = secrets.token_hex(16)
    # Letters and digits, because normalizers change others.
    aliases = {token["content"]: f"{secret}x{token['id']}x" for token in special}
    for token in special:
        token["content"] = aliases[token["content"]]
    _rename(content["model"], aliases)
    renamed = Tokenizer.from_str(json.dumps(content))
    found = set(renamed.encode("a".join(("", *aliases.values(), "")), add_special_tokens=False).ids)
    for name, token in zip(aliases, special, strict=True):
        if token["id"] not in found:
            raise ConfigError(
                f"the tokenizer takes its special token {name!r} in some places only",
                field="user_special_tokens",
                value="text",
                allowed=("allow",),
                cure="with this tokenizer, clients' special tokens cannot be told apart",
            )
    return renamed, aliases


def _rename(model: dict[str, Any], aliases: Mapping[str, str]) -> None:
    """Renames them in the model's vocabulary, too: it would find them in ordinary text."""
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
