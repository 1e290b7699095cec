"""Translates between our module paths and checkpoints' tensor names, by tables of prefixes."""

from collections.abc import Mapping
from types import MappingProxyType

# In our modules' spelling; `checkpoint_prefixes` of some families rename them.
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SCORE = "score.weight"  # of a classification head
# The prefix of language models inside multimodal models.
LANGUAGE_MODEL = MappingProxyType({"language_model.": "", "model.language_model.": "model."})


def renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """Replaces the first of the prefixes that `name` begins with. A `*` in a prefix stands for one part of the name,
    such as a layer's number, and is kept."""
    for prefix, other in prefixes.items():
        before, star, after = prefix.partition("*")
        if not name.startswith(before):
            continue
        part, _, _ = name.removeprefix(before).partition(".")
        prefix = before + part + after if star else prefix
        if name.startswith(prefix):
            return other.replace("*", part) + name.removeprefix(prefix)
    return name
