"""Whether a regular expression that somebody wrote into a checkpoint can be matched in time.

Python tries all ways to match, which can take longer than a node lives, and no other thread runs meanwhile.
"""

import re

_CHARACTERS_MAX = 256
_FORKS = re.compile(r"[*+?{(]")  # repeats and groups: each one multiplies the ways
_REPEATED_GROUP = re.compile(r"\)[*+{]")  # an exponential number of ways


def may_hang(expression: str, *, forks_max: int) -> bool:
    """Whether it has more repeats and groups than `forks_max`, or a group that is repeated."""
    forks = len(_FORKS.findall(expression.replace("(?:", "(")))
    return len(expression) > _CHARACTERS_MAX or forks > forks_max or bool(_REPEATED_GROUP.search(expression))
