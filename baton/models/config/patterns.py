"""Checks that matching a regular expression from a checkpoint's files cannot take too long.

Python tries all ways to match, which can take practically forever, and no other thread runs meanwhile.
"""

import re

_CHARACTERS_MAX = 256
_FORKS = re.compile(r"[*+?{(]")  # repeats and groups: each one multiplies the ways
_REPEATED_GROUP = re.compile(r"\)[*+{]")  # an exponential number of ways


def may_hang(expression: str, *, forks_max: int) -> bool:
    """Whether the expression has more repeats and groups than `forks_max`, or a repeated group."""
    forks = len(_FORKS.findall(expression.replace("(?:", "(")))
    return len(expression) > _CHARACTERS_MAX or forks > forks_max or bool(_REPEATED_GROUP.search(expression))
