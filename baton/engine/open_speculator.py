"""Opens the speculator of a node's engine, as its settings say."""

from baton.engine.build import BuiltRunner
from baton.engine.speculation.speculator import Speculator
from baton.grammar.forced_tokens import ForcedTokens
from baton.settings.node_config import NodeSettings


def open_speculator(settings: NodeSettings, built: BuiltRunner) -> Speculator | None:
    """The speculator of a node's engine. Returns None if it has none."""
    if settings.speculation == "off":
        return None
    return Speculator(grammars=ForcedTokens(built.grammars), always=settings.speculation == "always")
