"""`baton top`: shows a gateway's cluster live in the terminal."""

import asyncio
import signal
import sys
from time import monotonic
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from baton.cli.access import ApiKey, ClientCa, use
from baton.cli.cluster_view import ClusterView, read_view
from baton.cli.frame import Frame
from baton.client.client import DEFAULT_TARGET, UNARY_TIMEOUT_S
from baton.client.operators import OperatorClient
from baton.core.errors import BatonError, ConfigError, NoNode, PermissionDenied, Unauthenticated
from baton.core.log_lines import escaped

# Least width if the output is not a terminal, so that long names are not cut.
_WIDTH_IN_FILES = 160
_FRAME_S = 5.0  # a suspended gateway keeps its connections open without answering; the next frame asks again
_TERMINATED = 128 + signal.SIGTERM
# Errors that asking again does not fix.
_LASTING = (ConfigError, PermissionDenied, Unauthenticated)
_INTERVAL_S_MIN, _INTERVAL_S_MAX = 0.2, 3600.0


def top(
    target: Annotated[str, typer.Option(help="host:port of a gateway.", envvar="BATON_TARGET")] = DEFAULT_TARGET,
    interval: Annotated[
        float, typer.Option(min=_INTERVAL_S_MIN, max=_INTERVAL_S_MAX, help="Seconds between frames.")
    ] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame without colours and end; the default if output is piped.")
    ] = False,
    api_key: ApiKey = None,
    client_ca: ClientCa = None,
) -> None:
    """Show nodes, links, latencies and slow requests, live."""
    use(api_key, client_ca)
    console = Console(highlight=False)
    if once or not console.is_terminal or console.is_dumb_terminal:
        _print(asyncio.run(_ask(target, within_s=UNARY_TIMEOUT_S)))
        return
    try:
        asyncio.run(_watch(target, console, interval))
    except KeyboardInterrupt:
        raise typer.Exit from None
    except asyncio.CancelledError:
        raise typer.Exit(_TERMINATED) from None


def _print(view: ClusterView) -> None:
    console = Console(highlight=False, force_terminal=False, color_system=None)
    if not sys.stdout.isatty():
        console.width = max(console.width, _WIDTH_IN_FILES)
    frame = Frame(view, whole=True)
    while (least := frame.least_width(console)) > console.width:
        console.width = least  # the terminal wraps lines; a wider frame may have more columns
    console.print(frame)


async def _watch(target: str, console: Console, interval_s: float) -> None:
    """Shows frames until the task is cancelled.

    Raises:
        BatonError: the gateway will never answer.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)  # `Live` then restores the terminal
    frames = Frames(target)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        loop.add_signal_handler(signal.SIGWINCH, live.refresh)
        while True:
            live.update(await frames.following(), refresh=True)
            await asyncio.sleep(interval_s)


class Frames:
    """The frames of one gateway. A frame also shows that the gateway does not answer; the next frame asks again."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._view: ClusterView | None = None
        self._before: ClusterView | None = None
        self._at_s = 0.0

    async def following(self) -> Frame:
        """Asks the gateway, and returns the next frame.

        Raises:
            BatonError: the gateway will never answer.
        """
        trouble = ""
        try:
            found = await _ask(self._target, within_s=_FRAME_S)
        except _LASTING:
            raise
        except BatonError as error:
            trouble = escaped(str(error))
        else:
            if self._view is None or found.now_s != self._view.now_s:  # else the gateway sent the same view again
                self._before, self._view, self._at_s = self._view, found, monotonic()
        return Frame(self._view, self._before, trouble, monotonic() - self._at_s)


async def _ask(target: str, *, within_s: float) -> ClusterView:
    try:
        async with asyncio.timeout(within_s), OperatorClient(target) as client:
            return read_view(await client.cluster_view())
    except TimeoutError:
        raise NoNode(f"{target} did not answer within {within_s:g} s", field="target", value=target) from None
