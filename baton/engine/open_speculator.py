"""Opens the guesses of a node's engine, as its settings say."""

import logging

from baton.engine.build import BuiltRunner
from baton.engine.speculation.speculator import Speculator
from baton.grammar.forced_tokens import ForcedTokens
from baton.settings.node_config import NodeSettings

_log = logging.getLogger(__name__)


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
    return Speculator(grammars=ForcedTokens(built.grammars), always=settings.speculation == "always")
