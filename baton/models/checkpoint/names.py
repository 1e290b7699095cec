"""Translates between the paths of our modules and the tensor names of checkpoints, by tables of prefixes."""

from collections.abc import Mapping
from types import MappingProxyType

# As our modules have them; `checkpoint_prefixes` of some families rename them.
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# What multimodal models have before the names of their language models.
LANGUAGE_MODEL = MappingProxyType({"language_model.": "", "model.language_model.": "model."})


def renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """`name` with the first of the prefixes that it begins with replaced. A `*` in a prefix is one part of the name,
    such as a layer's number, and stays."""
    for prefix, other in prefixes.items():
        before, star, after = prefix.partition("*")
        if not name.startswith(before):
            continue
        part, _, _ = name.removeprefix(before).partition(".")
        prefix = before + part + after if star else prefix
        if name.startswith(prefix):
            return other.replace("*", part) + name.removeprefix(prefix)
    return name
