"""The table of transports by name, with the way to open each.

Other distributions register a `TransportKind` by an entry point of the group `baton.transports`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from baton.core import plugins
from baton.core.errors import ConfigError
from kvtransfer.transports.transport import AddressProbe, Transport


@dataclass(frozen=True)
class TransportKind:
    """One row of the table.

    Attributes:
        open: makes one, for use on this thread. Its argument: whether this node offers GPU memory.
        carriers: what `Transport.carrier` may return between processes of one machine.
        open_probe: makes the probe that tries addresses of unauthenticated peers; None: its addresses are harmless.
    """

    open: Callable[[bool], Transport]
    carriers: frozenset[str]
    open_probe: Callable[[], AddressProbe] | None = None


# NOTE: each is imported when it is opened, because importing ucxx writes to the environment.
def _ucx(on_gpu: bool) -> Transport:
    from kvtransfer.transports.ucx import UcxTransport

    return UcxTransport(on_gpu=on_gpu)


def _ucx_probe() -> AddressProbe:
    from kvtransfer.transports.ucx_probe import UcxProbe

    return UcxProbe()


def _loopback(_on_gpu: bool) -> Transport:
    from kvtransfer.transports.loopback import LoopbackTransport

    return LoopbackTransport()


TRANSPORTS: Mapping[str, TransportKind] = MappingProxyType(
    {
        "ucx": TransportKind(_ucx, frozenset({"cma", "sysv", "posix", "tcp", "cuda_ipc"}), _ucx_probe),
        "loopback": TransportKind(_loopback, frozenset({"loopback"})),
    }
)


def open_transport(name: str, *, on_gpu: bool = False) -> Transport:
    """Opens the transport of that name, for use on this thread.

    Args:
        on_gpu: this node offers GPU memory; the GPU must be current on this thread.

    Raises:
        ConfigError: the name is unknown; lists the known ones.
    """
    return find_transport(name).open(on_gpu)


def find_transport(name: str) -> TransportKind:
    """The transport of that name, ours or a plug-in's.

    Raises:
        ConfigError: there is none, and the error lists the known names; or its plug-in is broken.
    """
    kind = plugins.find_registered(plugins.TRANSPORTS, name, TRANSPORTS, TransportKind)
    if kind is None:
        allowed = (*TRANSPORTS, *plugins.plugin_names(plugins.TRANSPORTS, TRANSPORTS))
        raise ConfigError(f"transport is {name!r}", field="transport", value=name, allowed=allowed)
    return kind


def open_probe(name: str) -> AddressProbe | None:
    """Opens the probe that tries addresses of unauthenticated peers, for one event loop. Returns None if that
    transport's addresses are harmless."""
    probe = find_transport(name).open_probe
    return None if probe is None else probe()
