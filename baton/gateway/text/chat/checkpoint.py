"""What a checkpoint's files say about conversations: its chat templates, special tokens, and kind of model."""

from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT = "default"
TOOL_USE = "tool_use"


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint's files say about its chat format.

    Attributes:
        templates: texts by name; "default" is the one without a name.
        variables: special tokens as templates know them, such as `bos_token`.
        tokens: id of each added token by its text.
        special: texts of the special tokens, which decoding can skip.
        model_type: of config.json.
    """

    templates: Mapping[str, str]
    variables: Mapping[str, str]
    tokens: Mapping[str, int]
    special: frozenset[str]
    model_type: str
