"""Refuses grammars without reading them: the model cannot follow any, or the text is too long."""

from collections.abc import Sequence
from pathlib import Path

from baton.core.types import Grammar
from baton.grammar.refusal import refusal

MOST_BYTES = 1 << 18


def check_usable(tokenizer_json: Path, eos_token_ids: Sequence[int]) -> None:
    """Checks that grammars work with a model's tokenizer.

    Raises:
        InvalidRequest: no grammar can be followed with this model.
    """
    if not tokenizer_json.is_file():
        raise refusal(
            f"{tokenizer_json} does not exist, so no output can be constrained",
            cure="serve a model directory that has a tokenizer.json",
        )
    if not eos_token_ids:
        raise refusal("the model has no token that ends a sequence, so no output can be constrained")


def check_size(grammar: Grammar) -> None:
    """Checks the length of a grammar's text.

    Raises:
        InvalidRequest: the grammar's text is too long.
    """
    if (size := len(grammar.text.encode(errors="surrogatepass"))) > MOST_BYTES:
        raise refusal(f"the grammar has {size} bytes", value=size, allowed=(f"at most {MOST_BYTES}",))
