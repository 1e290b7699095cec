"""`baton status` shows the gateway's warnings, and no text of them controls the terminal."""

from rich.console import Console

from baton.cli.status_json import to_json
from baton.cli.status_tables import render
from baton.protos.v1 import operations_pb2

WARNING = "the chat template 'de\x1b[2Jfault' shows tools in an unknown format"


def test_warnings_are_shown_in_tables_and_in_json() -> None:
    cluster = operations_pb2.ClusterStatusResponse(gateway="gw", warnings=[WARNING])
    console = Console(width=160, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(render(cluster))
    assert "shows tools in an unknown format" in captured.get()
    assert "\x1b" not in captured.get()
    assert to_json(cluster)["warnings"] == [WARNING]
