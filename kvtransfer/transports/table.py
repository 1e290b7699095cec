"""The transports by name."""

from collections.abc import Callable

from baton.errors import ConfigError
from kvtransfer.transports.transport import Transport


def open_transport(name: str, *, on_gpu: bool = False) -> Transport:
    """The transport of that name, ready to use from this thread on.

    Args:
        on_gpu: this node can offer memory of a GPU; the device must be current on this thread.

    Raises:
        ConfigError: there is none; lists the known ones.
    """
    # NOTE: imported here because ucxx writes to the environment when it is imported.
    from kvtransfer.transports.loopback import LoopbackTransport
    from kvtransfer.transports.ucx import UcxTransport

    table: dict[str, Callable[[], Transport]] = {
        "ucx": lambda: UcxTransport(on_gpu=on_gpu),
        "loopback": LoopbackTransport,
    }
    if name not in table:
        raise ConfigError(f"transport is {name!r}", field="transport", value=name, allowed=tuple(table))
    return table[name]()
