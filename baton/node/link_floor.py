"""Refuses a pair whose link is slower than the operator's floor, with cures."""

from collections.abc import Iterator
from pathlib import Path

from baton.node.assembly import Node
from baton.node.doctor.cures import cure_for
from baton.node.doctor.machine import Host, Wanted, check_machine, read_host
from baton.node.doctor.verdict import Grade
from kvtransfer.plan import Mismatch
from kvtransfer.records import LinkMeasure


def below_floor(node: Node, measure: LinkMeasure) -> Mismatch | None:
    """The reason to refuse a pair with that link. Returns None if the link is fast enough."""
    settings = node.settings
    if measure.gigabytes_per_s >= settings.link_floor_gb_per_s:
        return None
    staging_bytes = settings.staging_bytes(on_gpu=node.built.cache.view.is_cuda)
    here = machine_cures(Wanted(pairs=1, cache_bytes=0, staging_bytes=staging_bytes), read_host())
    return Mismatch(
        "link",
        ours=f"{measure.gigabytes_per_s:.3g} GB/s over {measure.transport} (measured)",
        theirs=f"at least {settings.link_floor_gb_per_s:g} GB/s (required by {node.name}, --link-floor-gb-per-s)",
        cure="; ".join([cure_for(measure.transport), *(f"on {node.name}'s machine: {cure}" for cure in here)]),
    )


def machine_cures(wanted: Wanted, host: Host, root: Path = Path("/")) -> Iterator[str]:
    """Cures for everything that `baton doctor` would warn about on this machine; reads a few files."""
    for verdict in check_machine(wanted, host, root):
        if verdict.grade is not Grade.OK:
            yield f"{verdict.check} {verdict.found}: {verdict.cure}"
