"""The chat templates, special tokens and model type of a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT = "default"
TOOL_USE = "tool_use"


@dataclass(frozen=True)
class Checkpoint:
    """The parts of a checkpoint that determine its chat format.

    Attributes:
        templates: template texts by name; "default" is the template without a name.
        variables: special tokens by their names in templates, such as `bos_token`.
        tokens: ids of the added tokens by their texts.
        special: texts of the special tokens, which decoding can skip.
        model_type: `model_type` of config.json.
    """

    templates: Mapping[str, str]
    variables: Mapping[str, str]
    tokens: Mapping[str, int]
    special: frozenset[str]
    model_type: str
