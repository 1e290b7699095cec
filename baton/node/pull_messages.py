"""Messages of pulls: names of entries as they travel, and the checks of a caller's introduction. Pure.

Everything here comes from another process: sizes are checked before anything is derived from them.
"""

from collections.abc import Sequence

from baton.core.block_keys import DIGEST_BYTES, BlockKey
from baton.core.errors import InvalidRequest, PeerRefused, UnknownLease
from baton.core.kv_entries import ENTRY_TOKENS, EntryKey
from baton.node.peer_checks import check_info
from baton.protos.internal.v1 import node_pb2 as pb
from baton.protos.v1 import node_status_pb2
from kvtransfer.pull_sender import NUMBER_BITS
from kvtransfer.records import PullJob

# A sequence of four million tokens.
ENTRIES_MAX = 1 << 16
_TOKEN_BYTES = 4
_ENTRY_TOKEN_BYTES = ENTRY_TOKENS * _TOKEN_BYTES
_ADDRESS_BYTES_MAX = 1 << 16
_NODES = (node_status_pb2.ROLE_PREFILL, node_status_pb2.ROLE_DECODE)


def wanted_job(job: PullJob, *, owner: int | None = None) -> pb.WantedEntries:
    """The message that asks for what a pull is to bring.

    Args:
        owner: the only rank of the reader that receives it; None: every rank receives its share.
    """
    if job.state_after is None:
        return wanted_entries(job.number, job.keys, owner=owner)
    keys = job.keys or (job.state_after,)
    return wanted_entries(job.number, keys, held=len(keys) - len(job.keys), with_state=True, owner=owner)


def wanted_entries(
    number: int, keys: Sequence[EntryKey], *, held: int = 0, with_state: bool = False, owner: int | None = None
) -> pb.WantedEntries:
    """The message that names consecutive entries; see its definition."""
    return pb.WantedEntries(
        number=number,
        root=keys[0].root,
        parent=keys[0].block.parent,
        first=keys[0].number,
        digests=b"".join(key.block.digest for key in keys),
        tokens=b"".join(key.block.tokens for key in keys),
        owner_rank=owner,
        held=held,
        with_state=with_state,
    )


def pull_job(wanted: pb.WantedEntries) -> PullJob:
    """The pull that a message asks for.

    Raises:
        InvalidRequest: its parts have no possible sizes.
    """
    keys = entry_keys(wanted)
    most = len(keys) if wanted.with_state else len(keys) - 1
    _check_held(wanted, most)
    return PullJob(wanted.number, keys[wanted.held :], keys[-1] if wanted.with_state else None)


def searched_entries(wanted: pb.EntrySearch) -> tuple[tuple[EntryKey, ...], int]:
    """The entries of a search, and how many of the first ones the caller has.

    Raises:
        InvalidRequest: its parts have no possible sizes.
    """
    keys = entry_keys(wanted.entries)
    _check_held(wanted.entries, len(keys))
    return keys, wanted.entries.held


def _check_held(wanted: pb.WantedEntries, most: int) -> None:
    if wanted.held > most:
        raise InvalidRequest(
            f"the caller has {wanted.held} of the entries", field="held", value=wanted.held, allowed=(f"0 to {most}",)
        )


def entry_keys(wanted: pb.WantedEntries) -> tuple[EntryKey, ...]:
    """The entries that a message asks for.

    Raises:
        InvalidRequest: its parts have no possible sizes.
    """
    count = len(wanted.digests) // DIGEST_BYTES
    for field, size, expected in (
        ("digests", len(wanted.digests), count * DIGEST_BYTES),
        ("tokens", len(wanted.tokens), count * _ENTRY_TOKEN_BYTES),
        ("root", len(wanted.root), DIGEST_BYTES),
        ("parent", len(wanted.parent), DIGEST_BYTES),
    ):
        if size != expected:
            raise InvalidRequest(
                f"{field} has {size} bytes for {count} entries", field=field, value=size, allowed=(str(expected),)
            )
    if not 0 < count <= ENTRIES_MAX:
        raise InvalidRequest(f"a pull of {count} entries", field="digests", allowed=(f"1 to {ENTRIES_MAX}",))
    if wanted.number >= 1 << NUMBER_BITS:
        raise InvalidRequest("the pull's number is too long", field="number", allowed=(f"{NUMBER_BITS} bits",))
    keys: list[EntryKey] = []
    parent = wanted.parent
    for index in range(count):
        digest = wanted.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        tokens = wanted.tokens[index * _ENTRY_TOKEN_BYTES : (index + 1) * _ENTRY_TOKEN_BYTES]
        keys.append(EntryKey(BlockKey(digest, tokens, parent), wanted.root, wanted.first + index))
        parent = digest
    return tuple(keys)


def check_hello(hello: pb.PullHello, ours: node_status_pb2.NodeInfo, namespace: bytes) -> None:
    """Checks whether a node may pull from this one.

    Args:
        ours: this node's description of itself.
        namespace: of this node's entries.

    Raises:
        PeerRefused: its description is impossible, or its entries and ours are not of one kind.
        UnknownLease: it means another incarnation of this node.
    """
    theirs = hello.info
    check_info(theirs, role=theirs.role if theirs.role in _NODES else node_status_pb2.ROLE_DECODE)
    if hello.incarnation != ours.incarnation:
        raise UnknownLease(
            f"incarnation {hello.incarnation:x} of {ours.name} is over; it has incarnation {ours.incarnation:x} now",
            field="incarnation",
            value=f"{hello.incarnation:x}",
        )
    if hello.namespace != namespace:
        raise PeerRefused(
            f"entries of {ours.name} and of {theirs.name} are of different kinds: {_differences(ours, theirs)}",
            field="namespace",
            value=hello.namespace.hex(),
            allowed=(namespace.hex(),),
            cure="pull between nodes of the same model, KV dtype and --speculation, in batch-invariant mode also of as "
            "many ranks",
        )


def check_worker_addresses(addresses: Sequence[bytes], *, links: int) -> None:
    """Checks the addresses of a node's ends of links.

    Raises:
        PeerRefused: there is not one for each link, or one is too long.
    """
    if len(addresses) != links:
        raise PeerRefused(
            f"{len(addresses)} addresses for {links} links", field="worker_addresses", allowed=(str(links),)
        )
    longest = max(map(len, addresses))
    if longest > _ADDRESS_BYTES_MAX:
        raise PeerRefused(
            f"an address of {longest} bytes", field="worker_addresses", allowed=(f"up to {_ADDRESS_BYTES_MAX} bytes",)
        )


def _differences(ours: node_status_pb2.NodeInfo, theirs: node_status_pb2.NodeInfo) -> str:
    """What differs, with the value of each node."""
    fields = (
        ("model", ours.model.name, theirs.model.name),
        ("config_digest", ours.model.config_digest, theirs.model.config_digest),
        ("weights_digest", ours.model.weights_digest, theirs.model.weights_digest),
        ("content_digest", ours.model.content_digest, theirs.model.content_digest),
        ("layers that draft", ours.cache_spec.draft.num_layers, theirs.cache_spec.draft.num_layers),
        ("draft_digest", ours.draft_digest, theirs.draft_digest),
        ("KV dtype", ours.cache_spec.dtype, theirs.cache_spec.dtype),
        ("tensor_parallel_size", ours.tensor_parallel_size, theirs.tensor_parallel_size),
        ("expert_parallel", ours.expert_parallel, theirs.expert_parallel),
        ("attention_data_parallel", ours.attention_data_parallel, theirs.attention_data_parallel),
        ("batch_invariant", ours.batch_invariant, theirs.batch_invariant),
        ("rows_in_order", ours.rows_in_order, theirs.rows_in_order),
    )
    found = [f"{name} is {mine} and {other}" for name, mine, other in fields if mine != other]
    return ", ".join(found) or "their devices or dtypes differ"
