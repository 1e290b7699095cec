"""Which revisions of the weights and which versions of the program serve now, as this gateway sees it. Pure."""

from collections import Counter
from collections.abc import Iterable

from baton.core.version import __version__
from baton.gateway.fleet.fleet_node import FleetNode
from baton.protos.v1 import common_pb2, generation_pb2
from baton.rpc.revisions import revision_of


def serving_revisions(nodes: Iterable[FleetNode]) -> list[generation_pb2.Revision]:
    """Those of the nodes that work on requests, each with the name that one of its nodes has for it."""
    found: dict[str, generation_pb2.Revision] = {}
    for node in nodes:
        if node.serves and node.revision:
            revision = found.setdefault(node.revision, generation_pb2.Revision(revision=node.revision))
            revision.name = revision.name or node.revision_name
    return [found[revision] for revision in sorted(found)]


def differs_from_copies(
    model: common_pb2.ModelIdentity, role: common_pb2.Role.ValueType, others: Iterable[FleetNode]
) -> str:
    """Why a node cannot serve next to the others that have its revision; empty when it can.

    Copies of one revision have equal bytes unless one is damaged or edited. The copy that most nodes have serves; of
    equally many one that decode nodes have, which serve without others too; then the one with the lower digest, so that
    all gateways choose alike. Older nodes have no digest.
    """
    if not model.content_digest:
        return ""
    revision = revision_of(model)
    copies = [node for node in others if node.revision == revision and node.status.info.model.content_digest]
    holders = [(node.status.info.model.content_digest, node.role) for node in copies]
    holders.append((model.content_digest, role))
    count = Counter(digest for digest, _ in holders)
    decoding = {digest for digest, role in holders if role == common_pb2.ROLE_DECODE}
    chosen = min(count, key=lambda digest: (-count[digest], digest not in decoding, digest))
    if chosen == model.content_digest:
        return ""
    names = ", ".join(node.name for node in copies if node.status.info.model.content_digest == chosen)
    return (
        f"its weights differ in some bytes from those of {names} (content digest {model.content_digest[:12]}, theirs "
        f"{chosen[:12]}): one copy is damaged or edited; compare its files with their publisher's, and copy it again"
    )


def serving_versions(nodes: Iterable[FleetNode]) -> set[str]:
    """Those of the nodes that work on requests, and this gateway's own."""
    return {__version__, *(node.version for node in nodes if node.serves)}
