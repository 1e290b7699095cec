"""Names the revisions of the model's weights, and finds mixtures of revisions or versions that serve at once. Pure.

A revision is a digest of the fields that nodes compare before they exchange KV. So equal weights are one revision,
however they are stored and whatever operators call them. Names are for people.
"""

from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple

from baton.core.types import AdapterRef
from baton.protos.v1 import node_status_pb2 as pb

_HEX_DIGITS = 12
_NAMES_MAX = 4


def revision_of(model: pb.ModelIdentity) -> str:
    """The revision of a model: 12 hex digits, or empty if the model is unknown."""
    if not model.weights_digest:
        return ""
    parts = (model.architecture, model.config_digest, model.weights_digest)
    return sha256("\n".join(parts).encode()).hexdigest()[:_HEX_DIGITS]


def describe_revision(revision: str, name: str) -> str:
    """The revision in words, for people: its name, if it has one, and its digits."""
    return f"{name} ({revision})" if name else revision


def answer_revision(weights: str, adapter: AdapterRef | None) -> str:
    """The revision of an answer, for clients: the weights' revision and, if there is an adapter, a plus and its own."""
    return weights if adapter is None or not weights else f"{weights}+{adapter.revision}"


class Member(NamedTuple):
    """One process of a cluster; `revision` and `revision_name` are empty for a gateway, which has no weights."""

    name: str
    version: str
    revision: str = ""
    revision_name: str = ""


def mixture(members: Iterable[Member]) -> str:
    """One line that lists the versions and revisions that serve at once; empty if there is only one of each."""
    versions: dict[str, list[str]] = {}
    revisions: dict[str, list[str]] = {}
    names: dict[str, str] = {}
    for member in members:
        if member.version:
            versions.setdefault(member.version, []).append(member.name)
        if member.revision:
            revisions.setdefault(member.revision, []).append(member.name)
            names[member.revision] = names.get(member.revision) or member.revision_name
    revisions = {describe_revision(revision, names[revision]): nodes for revision, nodes in revisions.items()}
    found = (("versions", versions), ("revisions of the weights", revisions))
    return "; ".join(f"mixed {what}: {_listed(each)}" for what, each in found if len(each) > 1)


def _listed(members: dict[str, list[str]]) -> str:
    return ", ".join(
        f"{what} on {' and '.join(names) if len(names) <= _NAMES_MAX else f'{len(names)} processes'}"
        for what, names in members.items()
    )
