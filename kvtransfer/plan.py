"""Decides whether two nodes can exchange KV, and in what form KV travels between them. Pure values; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from baton.core.errors import ConfigError, PeerRefused
from baton.kvcache.spec import DTYPE_BYTES, KVCacheShape, KVCacheSpec
from kvtransfer.flows import Flow, RankPair, part_flows

# Versions of the wire: payload order, trailer, tag, digest. Every change to one of them raises the newest.
WIRE_OLDEST = 3
WIRE_NEWEST = 7
# Since this version segments are sealed with their lease's key.
_WIRE_SEALED = 4
# Since this version a model's cache may have other parts than KV; their layers are numbered after KV's.
_WIRE_PARTS = 5
# Since this version a node's ranks may each hold requests of their own.
_WIRE_OWNERS = 6
# Since this version a cache may have KV of layers that draft tokens.
_WIRE_DRAFT = 7


def wire_oldest(spec: KVCacheSpec, *, attention_data_parallel: bool = False) -> int:
    """The oldest wire version for such a cache and its ranks. Layers that draft need none, as they may be left out."""
    if attention_data_parallel:
        return _WIRE_OWNERS
    return WIRE_OLDEST if len(spec.without_draft.parts) == 1 else _WIRE_PARTS


@dataclass(frozen=True)
class NodeDescription:
    """A node as its peers see it.

    Model identity, `spec` except its `draft`, `batch_invariant` and `rows_in_order` must be equal on both ends, and
    wire ranges must overlap; an unknown content digest equals all, because older versions have none. `shape` and
    `package_version` may differ. So may `tensor_parallel_size`, `attention_data_parallel` and `expert_parallel`, except
    between batch-invariant nodes: they decide which parts ranks add up. The dtype of `spec` may differ if the receiver
    accepts conversion and neither node is batch-invariant; other parts are never converted. KV of layers that draft
    travels if both nodes have it.

    Attributes:
        spec: of the whole model, not of one rank's share.
        shape: of each rank's cache.
        converted_kv_dtypes: dtypes of senders' caches that this node receives converted to its own.
        attention_data_parallel: each rank has the whole KV of its own requests.
        expert_parallel: each rank has whole experts of a mixture.
        draft_digest: of the EAGLE-3 head whose KV is in the part `draft`; empty without one.
        rows_in_order: a token has the same bits as a decode and in any chunk of a prompt. True in batch-invariant mode,
            but for nodes of earlier versions.
    """

    architecture: str
    config_digest: str
    weights_digest: str
    spec: KVCacheSpec
    shape: KVCacheShape
    wire_oldest: int
    wire_newest: int
    package_version: str
    batch_invariant: bool = False
    tensor_parallel_size: int = 1
    converted_kv_dtypes: tuple[str, ...] = ()
    attention_data_parallel: bool = False
    content_digest: str = ""
    draft_digest: str = ""
    rows_in_order: bool = False
    expert_parallel: bool = False


@dataclass(frozen=True)
class Mismatch:
    """One reason why two nodes cannot work together, in words for operators."""

    field: str
    ours: str
    theirs: str
    cure: str


class PlanRefused(PeerRefused):
    """Two nodes cannot exchange KV; `mismatches` holds every reason."""

    def __init__(self, mismatches: tuple[Mismatch, ...]) -> None:
        self.mismatches = mismatches
        listed = "; ".join(f"{item.field} is {item.ours} here and {item.theirs} there" for item in mismatches)
        first = mismatches[0]
        super().__init__(
            f"the nodes cannot exchange KV: {listed}",
            field=first.field,
            value=first.theirs,
            allowed=(first.ours,),
            cure="; ".join(dict.fromkeys(item.cure for item in mismatches)),
        )


@dataclass(frozen=True)
class WirePlan:
    """The form in which two nodes agreed to exchange KV: the same at both ends, without blocks or layout.

    Attributes:
        spec: of KV as it is sent, which is as the receiver stores it. Without `draft` if one of them has none.
        converted_from: dtype of the sender's cache; None if the receiver's is the same.
    """

    wire_version: int
    spec: KVCacheSpec
    converted_from: str | None = None

    @property
    def sealed(self) -> bool:
        """Whether segments have seals."""
        return self.wire_version >= _WIRE_SEALED

    @property
    def has_draft(self) -> bool:
        """Whether KV of layers that draft tokens is sent too."""
        return self.spec.draft is not None

    @property
    def conversion(self) -> str:
        """The conversion in words, for operators; empty if KV keeps its dtype."""
        return f"{self.converted_from} to {self.spec.dtype}" if self.converted_from else ""


_SAME_CHECKPOINT = "serve the same checkpoint on both nodes"
_DAMAGED = "one copy of the weights is damaged or edited: compare its files with their publisher's, and copy it again"
_SAME_HEAD = "give both nodes the same --draft-head"
_SAME_DTYPE = "start both nodes with the same --dtype and --kv-cache-dtype"
_NOT_INVARIANT = "or both without BATON_BATCH_INVARIANT (--batch-invariant)"
_SAME_RANKS = (
    "start both nodes with the same --tensor-parallel-size, --expert-parallel and --attention-data-parallel, "
    + _NOT_INVARIANT
)
_CONVERT = "or the decode node with BATON_KV_CONVERT_FROM (--kv-convert-from) set to the prefill node's kv dtype"

_SPLIT_FIELDS = ("tensor_parallel_size", "expert_parallel", "attention_data_parallel")
_IDENTITY_FIELDS = ("architecture", "config_digest", "weights_digest")
_SPEC_CURES = {
    "num_layers": _SAME_CHECKPOINT,
    "kind": _SAME_CHECKPOINT,
    "num_kv_heads": _SAME_CHECKPOINT,
    "head_dim": _SAME_CHECKPOINT,
    "windows": _SAME_CHECKPOINT,
}
_PART_CURES = {
    "index": f"{_SAME_CHECKPOINT}, with the same version of the package",
    "state": f"{_SAME_CHECKPOINT}, with the same version of the package",
}


def agree(ours: NodeDescription, theirs: NodeDescription) -> WirePlan:
    """The plan under which these two nodes exchange KV: the newest wire version that both speak.

    Raises:
        PlanRefused: they cannot; lists every mismatch, each with its cure.
    """
    receiver = _receiver(ours, theirs)
    mismatches = [
        Mismatch(name, str(getattr(ours, name)), str(getattr(theirs, name)), _SAME_CHECKPOINT)
        for name in _IDENTITY_FIELDS
        if getattr(ours, name) != getattr(theirs, name)
    ]
    if not mismatches and (mismatch := _content_mismatch(ours, theirs)):
        mismatches.append(mismatch)
    mismatches += _spec_mismatches(ours.spec, theirs.spec, _SPEC_CURES)
    with_draft = _both_draft(ours, theirs)
    for name, cure in _PART_CURES.items():
        mismatches += _part_mismatches(name, getattr(ours.spec, name), getattr(theirs.spec, name), cure)
    if with_draft:
        mismatches += _draft_mismatches(ours, theirs)
    converts = receiver is not None and ours.spec.dtype != theirs.spec.dtype
    if receiver is None or (converts and ours.batch_invariant and theirs.batch_invariant):
        mismatches.append(_dtype_mismatch(ours, theirs, converts=converts))
    if ours.batch_invariant != theirs.batch_invariant:
        mismatches.append(_batch_invariant_mismatch(ours, theirs))
    elif ours.rows_in_order != theirs.rows_in_order:
        mismatches.append(_order_mismatch(ours, theirs))
    elif ours.batch_invariant:
        mismatches += _split_mismatches(ours, theirs)
    if not mismatches and (mismatch := _ranks_mismatch(ours, theirs)):
        mismatches.append(mismatch)
    wire_version = min(ours.wire_newest, theirs.wire_newest)
    if wire_version < max(ours.wire_oldest, theirs.wire_oldest):
        mismatches.append(_wire_mismatch(ours, theirs))
    if mismatches or receiver is None:
        raise PlanRefused(tuple(mismatches))
    sender = theirs if receiver is ours else ours
    spec = receiver.spec if with_draft else receiver.spec.without_draft
    return WirePlan(wire_version, spec, sender.spec.dtype if converts else None)


def links_between(sender: NodeDescription, receiver: NodeDescription) -> Mapping[RankPair, tuple[Flow, ...]]:
    """The links between two nodes that agreed, and what each carries of each part."""
    return part_flows(
        sender.spec if _both_draft(sender, receiver) else sender.spec.without_draft,
        senders=sender.tensor_parallel_size,
        receivers=receiver.tensor_parallel_size,
        whole_requests=sender.attention_data_parallel,
    )


def _both_draft(ours: NodeDescription, theirs: NodeDescription) -> bool:
    """Whether KV of layers that draft travels: both nodes have such layers, and their versions can send it."""
    new_enough = min(ours.wire_newest, theirs.wire_newest) >= _WIRE_DRAFT
    return new_enough and ours.spec.draft is not None and theirs.spec.draft is not None


def _spec_mismatches(
    ours: KVCacheSpec, theirs: KVCacheSpec, cures: Mapping[str, str], *, prefix: str = ""
) -> list[Mismatch]:
    return [
        Mismatch(prefix + name, str(getattr(ours, name)), str(getattr(theirs, name)), cure)
        for name, cure in cures.items()
        if getattr(ours, name) != getattr(theirs, name)
    ]


def _part_mismatches(name: str, ours: KVCacheSpec | None, theirs: KVCacheSpec | None, cure: str) -> list[Mismatch]:
    """The mismatches of a part other than KV; such parts are never converted.

    Args:
        cure: if only one of the nodes has the part.
    """
    if ours is None and theirs is None:
        return []
    if ours is None or theirs is None:
        here, there = ("none" if spec is None else f"{spec.num_layers} layers" for spec in (ours, theirs))
        return [Mismatch(name, here, there, cure)]
    return _spec_mismatches(ours, theirs, {**_SPEC_CURES, "dtype": _SAME_DTYPE}, prefix=f"{name}.")


def _draft_mismatches(ours: NodeDescription, theirs: NodeDescription) -> list[Mismatch]:
    """The mismatches of layers that draft, in what is not a field of their KV."""
    assert ours.spec.draft is not None
    assert theirs.spec.draft is not None
    found = _part_mismatches("draft", ours.spec.draft, theirs.spec.draft, _SAME_HEAD)
    found += _part_mismatches("draft.index", ours.spec.draft.index, theirs.spec.draft.index, _PART_CURES["index"])
    if ours.draft_digest != theirs.draft_digest:
        heads = ours.draft_digest or "none", theirs.draft_digest or "none"
        found.append(Mismatch("draft_digest", *heads, _SAME_HEAD))
    return found


def _receiver(ours: NodeDescription, theirs: NodeDescription) -> NodeDescription | None:
    """The node that can receive the other's KV in its own dtype; `ours` if the dtypes are equal.

    Returns None if neither can.
    """
    if ours.spec.dtype == theirs.spec.dtype:
        return ours
    for sender, receiver in ((ours, theirs), (theirs, ours)):
        # KV that was rounded to 8 bits is never converted, even if a peer accepts it.
        if sender.spec.dtype in receiver.converted_kv_dtypes and sender.spec.dtype in DTYPE_BYTES:
            return receiver
    return None


def _dtype_mismatch(ours: NodeDescription, theirs: NodeDescription, *, converts: bool) -> Mismatch:
    dtypes = ours.spec.dtype, theirs.spec.dtype
    cure = _SAME_DTYPE
    if converts:
        # A single process attends to KV in its cache's dtype, a prefill node to KV before its conversion. Their bits
        # differ, and batch-invariant mode promises that they do not.
        cure = f"{_SAME_DTYPE}, {_NOT_INVARIANT}"
    elif not (ours.batch_invariant or theirs.batch_invariant) and any(dtype in DTYPE_BYTES for dtype in dtypes):
        cure = f"{_SAME_DTYPE}, {_CONVERT}"
    return Mismatch("dtype", *dtypes, cure)


def _content_mismatch(ours: NodeDescription, theirs: NodeDescription) -> Mismatch | None:
    """The mismatch of two copies of one model that differ in some bytes."""
    digests = ours.content_digest, theirs.content_digest
    return None if "" in digests or digests[0] == digests[1] else Mismatch("content_digest", *digests, _DAMAGED)


def _ranks_mismatch(ours: NodeDescription, theirs: NodeDescription) -> Mismatch | None:
    try:
        links_between(ours, theirs)
    except ConfigError as error:
        sizes = str(ours.tensor_parallel_size), str(theirs.tensor_parallel_size)
        return Mismatch("tensor_parallel_size", *sizes, cure=str(error))
    return None


def _batch_invariant_mismatch(ours: NodeDescription, theirs: NodeDescription) -> Mismatch:
    """The mismatch of modes: prompt and continuation would be rounded differently, unlike in one process."""
    words = {True: "on", False: "off"}
    return Mismatch(
        "batch_invariant",
        words[ours.batch_invariant],
        words[theirs.batch_invariant],
        "set BATON_BATCH_INVARIANT (--batch-invariant) alike on both nodes",
    )


def _split_mismatches(ours: NodeDescription, theirs: NodeDescription) -> list[Mismatch]:
    """The mismatches of two batch-invariant nodes whose ranks add other parts: their last bits differ."""
    return [
        Mismatch(name, str(getattr(ours, name)), str(getattr(theirs, name)), _SAME_RANKS)
        for name in _SPLIT_FIELDS
        if getattr(ours, name) != getattr(theirs, name)
    ]


def _order_mismatch(ours: NodeDescription, theirs: NodeDescription) -> Mismatch:
    """The mismatch of orders: one node computes prompts in the order of decodes, and the other one in chunks."""
    words = {True: "in the order of decodes", False: "in chunks of a fixed size"}
    return Mismatch(
        "rows_in_order",
        words[ours.rows_in_order],
        words[theirs.rows_in_order],
        "use the same version on both nodes",
    )


def _wire_mismatch(ours: NodeDescription, theirs: NodeDescription) -> Mismatch:
    older = ours if ours.wire_newest < theirs.wire_oldest else theirs
    whose = "this node" if older is ours else "the other node"
    return Mismatch(
        "wire",
        f"{ours.wire_oldest} to {ours.wire_newest}",
        f"{theirs.wire_oldest} to {theirs.wire_newest}",
        f"upgrade {whose} from package version {older.package_version}",
    )
