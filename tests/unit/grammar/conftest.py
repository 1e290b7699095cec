"""One compiler for the demo models' tokenizer, and texts against grammars."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.grammar.compiler import GrammarCompiler
from baton.settings.config import DEMO_MODELS, tokenizer_file

TOKENIZER = tokenizer_file(DEMO_MODELS / "llama")
EOS = 4095
# More ids than the tokenizer has.
VOCAB_SIZE = 4100

Accepts = Callable[[GrammarKind, str, str], bool]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


@pytest.fixture(scope="session")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB_SIZE, (EOS,))


@pytest.fixture(scope="session")
def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer) -> Accepts:
    """Whether a text is a whole output of a grammar."""

    def accepts(kind: GrammarKind, grammar: str, text: str) -> bool:
        matcher = compiler.matcher(Grammar(kind, grammar))
        try:
            for token_id in tokenizer.encode(text, add_special_tokens=False).ids:
                matcher.consume(token_id)
        except InvalidRequest:
            return False
        return matcher.is_accepting

    return accepts
