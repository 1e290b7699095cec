"""`baton doctor`: replaces this process by `baton.node.doctor`, so that `baton` itself never imports torch.

What a gateway here would say about the model's chat templates is found first, because nodes do not read them.
"""

from typing import Annotated

import typer

from baton.cli.roles import become
from baton.core.errors import ConfigError
from baton.core.limits import RATE_MAX
from baton.settings.gateway_config import GatewaySettings
from baton.settings.reader import read_settings


def doctor(
    pairs: Annotated[int, typer.Option(min=1, max=4096, help="Peers that a node on this machine will have.")] = 8,
    min_gb_per_s: Annotated[float, typer.Option(min=0, max=RATE_MAX, help="Slowest acceptable link, in GB/s.")] = 0.3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check whether this machine or pod can run a node. Prints one verdict per line; exits with 1 if a check failed."""
    shown = ["--json"] if as_json else []
    warnings = [f"--template-warning={text}" for text in template_warnings()]
    become("baton.node.doctor", [f"--pairs={pairs}", f"--min-gb-per-s={min_gb_per_s}", *warnings, *shown])


def template_warnings() -> tuple[str, ...]:
    """Returns what a gateway with this environment would warn of; nothing if the model is not in a local directory."""
    try:
        settings = read_settings(GatewaySettings, "baton doctor", [])
    except ConfigError:
        return ()  # the checks read the settings too, and report it
    if not settings.model.is_dir():
        return ()
    # Imported here, because it takes longer than all of `baton --help`.
    from baton.gateway.text.chat.model import read_chat_model

    try:
        return read_chat_model(settings.model, settings.chat_template).warnings
    except ConfigError as error:
        return (str(error),)
