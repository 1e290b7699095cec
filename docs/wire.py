"""Writes docs/wire.md, whose tables come from `kvtransfer`; `make docs` calls it."""

from pathlib import Path

from baton.protos.internal.v1 import decode_pb2, lease_pb2, prefill_pb2
from kvtransfer.plan import WIRE_NEWEST, WIRE_OLDEST
from kvtransfer.refusals import SegmentRefusal
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

Nodes exchange two kinds of messages: gRPC messages control what happens, and UCX messages carry KV. The [.proto
files](../protos/baton/internal/v1/decode.proto) are the reference for every gRPC message. This page gives the order in
which they are sent, and the bytes of a segment. `make docs` writes its tables from the code.

## Services

| service | from | to | what it does |
|---|---|---|---|
| `Generation` | client | gateway | requests and their tokens |
| `Operations` | operator | gateway | status of the cluster, loads of its nodes, role switches, drops of KV |
| `Decode.Session` | gateway | decode node | one stream for all requests of a gateway |
| `Prefill.Prefill` | gateway | prefill node | one call for each prompt |
| `Prefill.Pool` | gateway | prefill node | one call for each batch of embeddings or scores |
| `Prefill.Connect` | gateway | prefill node | asks it to pair with a decode node |
| `Decode.Pair` | prefill node | decode node | one stream for as long as the pair lives |
| `Node` | gateway, operator | node | status, drain, role, adapters, changes of the prefix cache, drops of KV |
| `Node.Pull` | node | node | pulls kept KV |

## Pairing

1. The prefill node opens `Decode.Pair` and sends `PairHello` with its `NodeInfo`.
2. The decode node compares it with its own `NodeInfo`. If they do not match, it sends `PairRefused`, which lists every
   mismatch with its cure. Otherwise it sends `PairAccepted`: the wire version, the prefill node's sender number, the
   size of the largest message that it accepts, and the UCX addresses of all links. There is one link for each pair of
   ranks between which KV flows.
3. The prefill node connects and sends its own addresses in `PairLinked`; the decode node connects and sends
   `PairConnected`.
4. The prefill node sends warm-up messages over every link, then `WarmedUp`. The decode node checks and times them, and
   sends `PairReady` with the measured latency and GB/s. Now the pair carries requests.

Model identity, the KV of a token, and batch invariance must be equal. Layout, block size, number of ranks, attention
data parallelism and package version may differ, except that [batch-invariant
nodes](gpus.md#batch-invariant-steps) need equal ranks.

The messages of the stream, from the prefill node:

{_oneof(decode_pb2.PairRequest)}
From the decode node:

{_oneof(decode_pb2.PairResponse)}
## Versions

This release speaks the wire versions {WIRE_OLDEST} to {WIRE_NEWEST}. A pair uses the newest version that both nodes
speak, and is refused if there is none.

- **Version 4**: segments are sealed with their lease's key.
- **Version 5**: a cache may have two parts besides KV, an index and a state. If its model needs one of them, a node
  refuses peers of older versions.
- **Version 6**: the ranks of a node may each have their own requests (`--attention-data-parallel`). The node's tickets
  then name the receiving rank, and every rank of such a sender is linked with every rank of the receiver. Such a node
  refuses peers of older versions.
- **Version 7**: a cache may have a third part besides KV: that of layers that draft tokens. It is sent if both nodes
  have it and speak this version.

New protobuf fields need no new version, because older nodes ignore them. `make check` refuses any change that is not an
addition.

## Leases and tickets

After a decode node has reserved blocks, it opens a lease and sends it to the gateway in a ticket. The gateway passes
the ticket on with `PrefillRequest`. A lease's number has {LEASE_NUMBER_BITS} random bits. Its key has {LEASE_KEY_BYTES}
bytes, and only the ticket carries it.

{_message(lease_pb2.Lease)}
{_message(lease_pb2.Ticket)}
The prefill node answers with events:

{_oneof(prefill_pb2.PrefillEvent)}
When all KV is computed, the prefill node sends `HandOver` with the first token, on the pair's stream; the last segments
may still be in flight. The decode node closes the lease when it has the KV of all tokens and the hand-over. If the
request ends early, the decode node sends `LeaseEnded`. The prefill node then stops, and answers `Quiet` once nothing of
the lease is in flight. The decode node frees the blocks only then, so no late write can reach them.

## Segments

A UCX message is a payload, followed by a trailer of {TRAILER_BYTES} bytes. The payload is the KV of some layers, tokens
and heads, in the order layer, key/value, token, head, channel, in the dtype of the receiver's cache. The trailer is a
serialized `Segment`, whose fields all have a fixed size:

{_message(lease_pb2.Segment)}
- **Ranges.** `layer_stop`, `token_stop` and `head_stop` are exclusive.
- **Parts.** Layers are numbered consecutively over all parts of a cache: KV, then the index of sparse attention, then
  the state of recurrent layers, then KV of layers that draft tokens and their own index. A segment lies in one part.
  Each part has its own heads, which the ranks split. Only the first part is converted to another dtype.
- **Tokens.** The index and the KV of draft layers have the same tokens as KV. A state is sent once for each lease, at
  the last token that it contains, so a state of another length is refused.
- **Digest.** The digest is the sum, modulo 2^64, of the payload's digest, which
  [digest.py](../baton/kvcache/wire/digest.py) defines, and 64 bits of a BLAKE2b hash over all other fields.
- **Seal.** With a key, the hash is keyed. Another 64 bits of it are the seal, which takes the place of the incarnation.

The UCX tag has 64 bits, from the highest:

| part | bits | what it has |
|---|---|---|
| sender | {SENDER_BITS} | the number from `PairAccepted`, plus the sending rank |
| lease | {LEASE_BITS} | the lowest bits of the lease's number |
| number | {NUMBER_BITS} | counts the segments of the lease, from 0 to {SEGMENTS_MAX - 1} |

The numbers {WARM_UP}, {PING} and {PONG} mark warm-up messages and the two directions of a round trip.

## What a receiver refuses

A refused message is dropped before it reaches a cache. The node's status counts it: `late` messages as `segments_late`,
all others as `segments_refused`.

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
