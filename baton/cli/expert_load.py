"""`baton expert-load`: saves how many tokens each expert of a node got, in the format that --expert-load reads."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.output import check_output, write_output
from baton.core.expert_load import ExpertLoad
from baton.core.limits import SECONDS_MAX
from baton.rpc.convert_node import expert_load_from_proto
from baton.rpc.describe import expert_load as ask


def expert_load(
    node: Annotated[str, typer.Argument(help="host:port of a node with --expert-parallel.")],
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0, max=SECONDS_MAX, help="Count for this many seconds from now. Default: all since the node's start."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="File to write. Default: standard output.", show_default=False)
    ] = None,
) -> None:
    """Save how many tokens each expert of a node got.

    Writes JSON by layer and expert. Pass the file to the node's next start with --expert-load.
    """
    if output is not None:
        check_output(output, field="output")
    text = f"{asyncio.run(_load(node, seconds)).model_dump_json()}\n"
    if output is None:
        print(text, end="")
    else:
        write_output(output, text, field="output")


async def _load(node: str, seconds: float | None) -> ExpertLoad:
    load = expert_load_from_proto(await ask(node))
    if seconds is None:
        return load
    await asyncio.sleep(seconds)
    return expert_load_from_proto(await ask(node)).since(load)
