"""Whether a pair's link is what the operator wants of it, and what helps where it is not. Knows no role and no grpc."""

from collections.abc import Iterator
from pathlib import Path

from kvtransfer.plan import Mismatch
from kvtransfer.records import LinkMeasure
from node.assembly import Node
from node.doctor.cures import cure_for
from node.doctor.machine import Wanted, check_machine
from node.doctor.verdict import Grade


def below_floor(node: Node, measure: LinkMeasure) -> Mismatch | None:
    """The reason against a pair over that link; None when there is none."""
    settings = node.settings
    if measure.gigabytes_per_s >= settings.link_floor_gb_per_s:
        return None
    staging_bytes = 2 * settings.staging_slots * settings.segment_bytes(on_gpu=node.built.cache.view.is_cuda)
    here = machine_cures(Wanted(pairs=1, cache_bytes=0, staging_bytes=staging_bytes))
    return Mismatch(
        "link",
        ours=f"{measure.gigabytes_per_s:.3g} GB/s over {measure.transport} (measured)",
        theirs=f"at least {settings.link_floor_gb_per_s:g} GB/s (wanted by {node.name}, --link-floor-gb-per-s)",
        cure="; ".join([cure_for(measure.transport), *(f"on {node.name}'s machine: {cure}" for cure in here)]),
    )


def machine_cures(wanted: Wanted, root: Path = Path("/")) -> Iterator[str]:
    """What `baton doctor` would find fault with on this machine; reads a few files."""
    for verdict in check_machine(wanted, root):
        if verdict.grade is not Grade.OK:
            yield f"{verdict.check} {verdict.found}: {verdict.cure}"
