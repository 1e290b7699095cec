"""The process that checks grammars, each in a fork that a bound of CPU time, memory or time may end.

`baton.grammar.checker` starts it. It reads the tokenizer once.
"""

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from baton.bounded.lanes import Work, serve
from baton.core.errors import BatonError
from baton.core.types import Grammar, GrammarKind
from baton.grammar.compiler import GrammarCompiler
from baton.grammar.refusal import refusal


def checks(facts: Mapping[str, Any]) -> Work:
    """The work of the process that tries grammars.

    Args:
        facts: `tokenizer`, `vocab_size` and `eos_token_ids`, as of `GrammarCompiler`.
    """
    compiler = GrammarCompiler(Path(facts["tokenizer"]), facts["vocab_size"], facts["eos_token_ids"])
    with suppress(BatonError):  # each check reports the error
        compiler.load()

    def check(question: Mapping[str, Any], text: bytes) -> bytes:
        try:
            compiler.compile(Grammar(GrammarKind(question["kind"]), text.decode(errors="surrogatepass")))
        except RecursionError:
            raise refusal("the grammar is too deeply nested") from None
        return b""

    return check


if __name__ == "__main__":
    serve(sys.argv[1:], checks)
