"""Opens the guesses of a node's engine, as its settings say."""

import logging

from baton.core.errors import ConfigError
from baton.engine.build import BuiltRunner
from baton.engine.speculation.speculator import Speculator
from baton.settings.node_config import NodeSettings

_log = logging.getLogger(__name__)


def check_speculation(settings: NodeSettings) -> None:
    """Checks what the settings say of speculation, before a process starts to load for long.

    Raises:
        ConfigError: the node has `batch_invariant` too.
    """
    if settings.speculation != "off" and settings.batch_invariant:
        raise ConfigError(
            f"speculation is {settings.speculation}, and batch_invariant is on: last bits of a token's logits depend "
            "on how many tokens of its request a step computes",
            field="speculation",
            value=settings.speculation,
            allowed=("off",),
            cure="leave out --speculation, or --batch-invariant",
        )


def open_speculator(settings: NodeSettings, built: BuiltRunner) -> Speculator | None:
    """The guesses of a node's engine. Returns None if it has none."""
    if settings.speculation == "off":
        return None
    if built.cache.state is not None:
        _log.warning(
            "speculation is %s, but this model has recurrent states, which cannot be taken back to the tokens that are "
            "kept: nothing is guessed",
            settings.speculation,
        )
        return None
    return Speculator(always=settings.speculation == "always")
