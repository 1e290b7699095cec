"""Writes docs/wire.md, whose tables come from `kvtransfer`; `make docs` calls it."""

from pathlib import Path

from baton.protos.internal.v1 import decode_pb2, lease_pb2, prefill_pb2
from kvtransfer.leases import SegmentRefusal
from kvtransfer.plan import WIRE_NEWEST, WIRE_OLDEST
from kvtransfer.segments import (
    LEASE_BITS,
    LEASE_KEY_BYTES,
    LEASE_NUMBER_BITS,
    NUMBER_BITS,
    PING,
    PONG,
    SEGMENTS_MAX,
    SENDER_BITS,
    TRAILER_BYTES,
    WARM_UP,
)

PAGE = Path(__file__).resolve().parent / "wire.md"

_FIELDS = "| field | number | type |\n|---|---|---|\n"


def page() -> str:
    """The page's text."""
    return f"""# Wire protocol

Two things travel between nodes: gRPC messages, which say what is to happen, and UCX messages, which carry KV. The
[.proto files](../protos/baton/internal/v1/decode.proto) are the reference for every message; this page has the order in
which they are sent, and the bytes of a segment. `make docs` writes its tables from the code.

## Services

| service | from | to | what it does |
|---|---|---|---|
| `Generation` | client | gateway | requests and their tokens |
| `Decode.Session` | gateway | decode node | one stream for all requests of a gateway |
| `Prefill.Prefill` | gateway | prefill node | one call for each prompt |
| `Prefill.Connect` | gateway | prefill node | asks it to pair with a decode node |
| `Decode.Pair` | prefill node | decode node | one stream for as long as the pair lives |
| `Node` | gateway, operator | node | status, drain, changes of the prefix cache |

## Pairing

1. The prefill node opens `Decode.Pair` and sends `PairHello` with its `NodeInfo`.
2. The decode node compares it with its own. If they do not fit, it sends `PairRefused`, which lists every mismatch with
   its cure. Otherwise it sends `PairAccepted`: the wire version, the prefill node's sender number, the largest message
   that it takes, and the UCX addresses of all links, one for each pair of ranks between which KV flows.
3. The prefill node connects and sends its own addresses in `PairLinked`; the decode node connects and sends
   `PairConnected`.
4. The prefill node sends warm-up messages over every link, then `WarmedUp`. The decode node checks and times them, and
   sends `PairReady` with the measured latency and GB/s. Now the pair carries requests.

Model identity, what a token's KV consists of, and batch invariance have to be equal. Layout, block size, number of
ranks, attention data parallelism and package version may differ.

The messages of the stream, from the prefill node:

{_oneof(decode_pb2.PairRequest)}
From the decode node:

{_oneof(decode_pb2.PairResponse)}
## Versions

A build speaks the wire versions {WIRE_OLDEST} to {WIRE_NEWEST}. A pair uses the newest version that both nodes speak,
and is refused if there is none. Since version 4 segments are sealed with their lease's key. Since version 5 a cache may
have parts beside KV, an index and a state, and a model that has one refuses peers of older versions. Since version 6 a
node's ranks may each have requests of their own (`--attention-data-parallel`): then its tickets name the rank that
receives, every rank of such a sender is linked with every rank of the receiver, and it refuses peers of older versions.
New protobuf fields need no new version: older nodes ignore them, and `make check` refuses any change that is not an
addition.

## Leases and tickets

A decode node that has reserved blocks opens a lease and sends it to the gateway in a ticket, which the gateway passes
on with `PrefillRequest`. A lease's number has {LEASE_NUMBER_BITS} random bits; its key has {LEASE_KEY_BYTES} bytes,
which only the ticket carries.

{_message(lease_pb2.Lease)}
{_message(lease_pb2.Ticket)}
The prefill node answers with events:

{_oneof(prefill_pb2.PrefillEvent)}
When all KV is sent, the prefill node sends `HandOver` on the pair's stream, with the first token. The decode node
closes the lease when all tokens have arrived. If the request ends early, the decode node sends `LeaseEnded`; the
prefill node stops, and answers `Quiet` once nothing of the lease is in flight. Blocks are freed only after that, so a
late write never reaches them.

## Segments

A UCX message is a payload followed by a trailer of {TRAILER_BYTES} bytes. The payload has the KV of some layers, tokens
and heads in the order layer, key/value, token, head, channel, in the dtype of the receiver's cache. The trailer is a
serialized `Segment` whose fields all have a fixed size:

{_message(lease_pb2.Segment)}
`layer_stop`, `token_stop` and `head_stop` are exclusive. Layers are numbered in one row over all parts of a cache: KV,
then the index of sparse attention, then the state of recurrent layers. A segment lies in one part. Each part has heads
of its own, which ranks split. The index has the tokens of KV; a state is sent once for each lease, at the last token
that is in it, so that one of another length is refused. Index and state keep their dtypes. The digest is that of the
payload, which [digest.py](../baton/kvcache/wire/digest.py) defines, plus 64 bits of a BLAKE2b hash over all other
fields, modulo 2^64. With a key, the hash is keyed, and another 64 bits of it are the seal, which takes the place of the
incarnation.

The UCX tag has 64 bits, from the highest:

| part | bits | what it has |
|---|---|---|
| sender | {SENDER_BITS} | the number from `PairAccepted`, plus the sending rank |
| lease | {LEASE_BITS} | the lowest bits of the lease's number |
| number | {NUMBER_BITS} | counts the segments of the lease, from 0 to {SEGMENTS_MAX - 1} |

The numbers {WARM_UP}, {PING} and {PONG} mark warm-up messages and the two directions of a round trip.

## What a receiver refuses

A message that is refused is dropped before it reaches a cache, and counted: `late` ones as `segments_late`, all others
as `segments_refused` of the node's status.

| reason | a message is refused because |
|---|---|
{_refusals()}"""


def _message(message: type) -> str:
    descriptor = message.DESCRIPTOR  # type: ignore[attr-defined]
    rows = [f"| `{field.name}` | {field.number} | {_type(field)} |\n" for field in descriptor.fields]
    return f"`{descriptor.name}`:\n\n{_FIELDS}{''.join(rows)}"


def _oneof(message: type) -> str:
    described = message.DESCRIPTOR.oneofs  # type: ignore[attr-defined]
    (oneof,) = (each for each in described if not each.name.startswith("_"))  # those are of optional fields
    rows = [f"| `{field.name}` | {field.number} | {_type(field)} |\n" for field in oneof.fields]
    return _FIELDS + "".join(rows)


def _type(field: object) -> str:
    names = {
        value: name.removeprefix("TYPE_").lower()
        for name, value in vars(type(field)).items()
        if name.startswith("TYPE_")
    }
    message = getattr(field, "message_type", None)
    return f"`{message.name}`" if message is not None else names.get(getattr(field, "type", 0), "")


def _refusals() -> str:
    return "".join(f"| `{reason.name.lower()}` | {reason.value} |\n" for reason in SegmentRefusal)


if __name__ == "__main__":
    PAGE.write_text(page())
