"""The transports by name."""

from collections.abc import Callable

from baton.errors import ConfigError
from kvtransfer.transports.transport import AddressProbe, Transport


def open_transport(name: str, *, on_gpu: bool = False) -> Transport:
    """Opens the transport of that name, for use on this thread.

    Args:
        on_gpu: this node offers GPU memory; the GPU must be current on this thread.

    Raises:
        ConfigError: the name is unknown; lists the known ones.
    """
    # NOTE: imported here because importing ucxx writes to the environment.
    from kvtransfer.transports.loopback import LoopbackTransport
    from kvtransfer.transports.ucx import UcxTransport

    table: dict[str, Callable[[], Transport]] = {
        "ucx": lambda: UcxTransport(on_gpu=on_gpu),
        "loopback": LoopbackTransport,
    }
    if name not in table:
        raise ConfigError(f"transport is {name!r}", field="transport", value=name, allowed=tuple(table))
    return table[name]()


def open_probe(name: str) -> AddressProbe | None:
    """Opens what tries the addresses of peers that may be anybody, for one event loop; None: that transport's addresses
    are harmless."""
    from kvtransfer.transports.ucx_probe import UcxProbe

    return UcxProbe() if name == "ucx" else None
