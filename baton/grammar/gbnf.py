"""GBNF, the EBNF of llama.cpp, translated to Lark's syntax by the grammar library's own converter."""

import re

from llguidance.gbnf_to_lark import GrammarParser, gbnf_to_lark, resolve

from baton.grammar.refusal import refusal

_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
# Characters that mean something in a literal or in a class keep a backslash.
_MARKED = {'"': '\\"', "\\": "\\\\", "[": "\\[", "]": "\\]", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_START = re.compile(r"^start:", re.MULTILINE)
_LINE = re.compile(r"line (\d+)")


def lark_from_gbnf(text: str) -> str:
    """Translates GBNF to Lark.

    Raises:
        InvalidRequest: the text is no GBNF with a rule `root`; names the line.
    """
    try:
        plain = _ESCAPE.sub(_plain, text)
        rules = GrammarParser().parse(plain)
        resolve(rules)
        lark = gbnf_to_lark(plain)
        if rules["start"].alternatives.is_terminal():
            # As a terminal it is one regular expression. As a rule, its parts would each match as much as they can.
            lark = _START.sub("start: WHOLE_OUTPUT\nWHOLE_OUTPUT:", lark, count=1)
        return lark
    except RecursionError:
        raise refusal("the grammar is nested too deeply", value=text) from None
    except Exception as error:  # plain ones, and whatever the converter's code runs into
        line = _LINE.search(str(error))
        where = f"line {line[1]} of the grammar" if line else "the grammar"
        raise refusal(f"{where} is not GBNF: {error}", value=text, cure="write rules as name ::= ...") from error


def _plain(escape: re.Match[str]) -> str:
    """The character that a numeric escape means: the converter drops leading zeros of such numbers."""
    digits = escape[1] or escape[2] or escape[3]
    if not digits:
        return escape[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"{escape[0]} is not a character")
    character = chr(code)
    if character in "^-" or not character.isprintable():
        return _MARKED.get(character, f"\\x{code:02x}" if code < 0x100 else character)
    return _MARKED.get(character, character)
