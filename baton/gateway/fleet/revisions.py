"""Revisions of the weights and versions of the program that serve now, as this gateway sees them. Pure."""

from collections.abc import Iterable

from baton.core.version import __version__
from baton.gateway.fleet.fleet_node import FleetNode
from baton.protos.v1 import generation_pb2


def serving_revisions(nodes: Iterable[FleetNode]) -> list[generation_pb2.Revision]:
    """Revisions of the nodes that work on requests, each with the name that one of these nodes has for it."""
    found: dict[str, generation_pb2.Revision] = {}
    for node in nodes:
        if node.serves and node.revision:
            revision = found.setdefault(node.revision, generation_pb2.Revision(revision=node.revision))
            revision.name = revision.name or node.revision_name
    return [found[revision] for revision in sorted(found)]


def serving_versions(nodes: Iterable[FleetNode]) -> set[str]:
    """Versions of the nodes that work on requests, and this gateway's version."""
    return {__version__, *(node.version for node in nodes if node.serves)}
