"""The commands of the program `baton`."""

import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated

import typer

from baton.cli.adapter import adapter_app
from baton.cli.certs import certs, key
from baton.cli.chat import chat
from baton.cli.demo import demo
from baton.cli.doctor import doctor
from baton.cli.drain import drain
from baton.cli.drop_kv import drop_kv
from baton.cli.expert_load import expert_load
from baton.cli.generate import generate
from baton.cli.program import new_app, run
from baton.cli.roles import PASS_ON, decode_node, gateway, picker, prefill_node
from baton.cli.status import status
from baton.cli.switch_role import role as switch_role
from baton.cli.tools import bench, plan
from baton.cli.top import top
from baton.cli.up import up
from baton.core.version import __version__

_PASSED_ON = (prefill_node, decode_node, gateway, picker, bench, plan)
OPERATE = "Operate a cluster"
# Most used first.
_GROUPS: Mapping[str, Mapping[str, Callable[..., None]]] = MappingProxyType(
    {
        "Use a model": {"up": up, "chat": chat, "generate": generate, "demo": demo},
        "Run one process": {
            "prefill-node": prefill_node, "decode-node": decode_node, "gateway": gateway, "picker": picker,
        },
        OPERATE: {
            "status": status, "top": top, "drain": drain, "role": switch_role, "drop-kv": drop_kv,
            "expert-load": expert_load,
        },
        "Prepare and measure": {"doctor": doctor, "certs": certs, "key": key, "bench": bench, "plan": plan},
    }
)  # fmt: skip


def main() -> None:
    """Runs `baton` with the process's arguments."""
    run(program(), sys.argv[1:] or ["--help"], "baton")


def program() -> typer.Typer:
    """Returns the typer app with all commands."""
    app = new_app(completion=True)
    app.callback()(_whole_program)
    for title, commands in _GROUPS.items():
        for name, command in commands.items():
            settings = PASS_ON if command in _PASSED_ON else None
            app.command(name, context_settings=settings, rich_help_panel=title)(command)
    app.add_typer(adapter_app(), name="adapter", rich_help_panel=OPERATE)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"baton {__version__}")
        raise typer.Exit


def _whole_program(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve large language models with prefill and decode on separate nodes."""
