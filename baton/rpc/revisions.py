"""Revisions of the model's weights, and which revisions and versions of the program serve at once. Pure.

A revision is a digest of what nodes compare before they exchange KV, so equal weights are one revision however they are
stored, and whatever operators call them. Names are for people.
"""

from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple

from baton.core.types import AdapterRef
from baton.protos.v1 import node_status_pb2 as pb

_HEX_DIGITS = 12
_NAMES_MAX = 4


def revision_of(model: pb.ModelIdentity) -> str:
    """12 hex digits; empty where the model is not known."""
    if not model.weights_digest:
        return ""
    parts = (model.architecture, model.config_digest, model.weights_digest)
    return sha256("\n".join(parts).encode()).hexdigest()[:_HEX_DIGITS]


def describe_revision(revision: str, name: str) -> str:
    """A revision, for people: its name, if it has one, and its digits."""
    return f"{name} ({revision})" if name else revision


def answer_revision(weights: str, adapter: AdapterRef | None) -> str:
    """What clients get as an answer's revision: the weights', and after a plus the adapter's."""
    return weights if adapter is None or not weights else f"{weights}+{adapter.revision}"


class Member(NamedTuple):
    """One process of a cluster; `revision` and `revision_name` are empty for a gateway, which has no weights."""

    name: str
    version: str
    revision: str = ""
    revision_name: str = ""


def mixture(members: Iterable[Member]) -> str:
    """One line that says which versions and revisions serve at once; empty where there is one of each."""
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
