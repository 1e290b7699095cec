"""Checks a peer's description of itself and its addresses, before anything is derived from them. Pure.

Everything here comes from another process: sizes are bounded before they are multiplied, texts before they are logged.
"""

import math
from collections.abc import Sequence
from typing import Any

from baton.core.errors import PeerRefused
from baton.protos.internal.v1 import decode_pb2
from baton.protos.v1 import node_status_pb2
from kvtransfer.pair_ends import MOST_RANKS
from kvtransfer.records import LinkMeasure
from kvtransfer.segments import SENDER_BITS

_INFO_BYTES_MAX = 1 << 16
_TEXT_MAX = 512
_DTYPES_MAX = 16
_ADDRESS_BYTES_MAX = 1 << 16
# Limits far beyond every model and cache.
_SIZES = {
    "cache_spec.num_layers": (1, 1 << 14),
    "cache_spec.num_kv_heads": (1, 1 << 14),
    "cache_spec.head_dim": (1, 1 << 16),
    "cache_shape.block_size": (1, 1 << 20),
    "cache_shape.num_blocks": (1, 1 << 48),
    "tensor_parallel_size": (0, MOST_RANKS),
    "incarnation": (1, (1 << 64) - 1),
}
# Limits of each part of a cache other than KV.
_PART_SIZES = {"num_layers": (1, 1 << 14), "num_kv_heads": (1, 1 << 14), "head_dim": (1, 1 << 24)}
_TEXTS = (
    "name",
    "address",
    "package_version",
    "model.architecture",
    "model.config_digest",
    "model.weights_digest",
    "model.content_digest",
    "model.name",
    "model.revision_name",
    "model.vocabulary_digest",
    "cache_spec.dtype",
    "cache_shape.layout",
    "cache_identity",
    "draft_digest",
)
_CURE = "use the same version on both nodes"


def check_info(info: node_status_pb2.NodeInfo, *, role: node_status_pb2.Role.ValueType) -> None:
    """Checks a node's description of itself, which may have any content.

    Raises:
        PeerRefused: a size is impossible, a text is too long or not printable, or the node has another role.
    """
    if info.ByteSize() > _INFO_BYTES_MAX:
        raise _refusal("info", f"{info.ByteSize()} bytes", f"up to {_INFO_BYTES_MAX} bytes")
    if info.role != role:
        raise _refusal("role", info.role, node_status_pb2.Role.Name(role))
    for path in _TEXTS:
        _check_text(path, _value(info, path))
    for dtype in info.converted_kv_dtypes[: _DTYPES_MAX + 1]:
        _check_text("converted_kv_dtypes", dtype)
    if len(info.converted_kv_dtypes) > _DTYPES_MAX:
        raise _refusal("converted_kv_dtypes", f"{len(info.converted_kv_dtypes)} dtypes", f"up to {_DTYPES_MAX}")
    for path, (least, most) in _SIZES.items():
        value = _value(info, path)
        if not least <= value <= most:
            raise _refusal(path, value, f"{least} to {most}")
    windows, layers = len(info.cache_spec.windows), info.cache_spec.num_layers
    if windows not in (0, layers):
        raise _refusal("cache_spec.windows", f"{windows} windows", f"none, or one for each of {layers} layers")
    for name in ("index", "state"):
        if info.cache_spec.HasField(name):
            _check_part(f"cache_spec.{name}", getattr(info.cache_spec, name))


def check_accepted(accepted: decode_pb2.PairAccepted, *, ranks: int) -> None:
    """Checks the numbers that a decode node gives to a prefill node with `ranks` ranks.

    Raises:
        PeerRefused: a number does not fit into a tag.
    """
    most = (1 << SENDER_BITS) - ranks
    if accepted.sender_number > most:
        raise _refusal("sender_number", accepted.sender_number, f"0 to {most}")


def check_addresses(addresses: Sequence[decode_pb2.WorkerAddress], *, links: int) -> None:
    """Checks the addresses of a pair with `links` links.

    Raises:
        PeerRefused: there are more or fewer addresses than links, one link has two, or an address is too long.
    """
    if len(addresses) != links:
        raise _refusal("worker_addresses", f"{len(addresses)} addresses", f"{links}, one for each link")
    if len({(item.sender_rank, item.receiver_rank) for item in addresses}) != links:
        raise _refusal("worker_addresses", "two addresses for one link", "one for each link")
    longest = max((len(item.address) for item in addresses), default=0)
    if longest > _ADDRESS_BYTES_MAX:
        raise _refusal("worker_addresses", f"{longest} bytes", f"up to {_ADDRESS_BYTES_MAX} bytes each")


def check_measure(measure: LinkMeasure) -> LinkMeasure:
    """Checks a measure that a decode node reports, and returns it.

    Raises:
        PeerRefused: a number is negative or not finite, or the transport is not a short printable text.
    """
    for name in ("gigabytes_per_s", "latency_s", "message_cost_s"):
        value = getattr(measure, name)
        if not 0 <= value < math.inf:
            raise _refusal(name, value, "0 or more")
    _check_text("transport", measure.transport)
    return measure


def _check_part(path: str, part: node_status_pb2.CacheSpec) -> None:
    """Checks a part of a cache other than KV, which must have neither windows nor parts of its own."""
    for name, (least, most) in _PART_SIZES.items():
        value = getattr(part, name)
        if not least <= value <= most:
            raise _refusal(f"{path}.{name}", value, f"{least} to {most}")
    _check_text(f"{path}.dtype", part.dtype)
    if part.windows or part.HasField("index") or part.HasField("state"):
        raise _refusal(path, "windows or parts of its own", "neither")


def _check_text(path: str, text: str) -> None:
    if len(text) > _TEXT_MAX or not text.isprintable():
        raise _refusal(path, repr(text[:40]), f"printable, up to {_TEXT_MAX} characters")


def _value(message: node_status_pb2.NodeInfo, path: str) -> Any:
    value: Any = message
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _refusal(field: str, value: object, allowed: str) -> PeerRefused:
    return PeerRefused(f"the peer's {field} is {value}", field=field, value=value, allowed=(allowed,), cure=_CURE)
