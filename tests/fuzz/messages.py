"""Targets: messages of peers, as far as pure code reads them, and the headers and trailers of KV messages."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from baton.core.errors import InvalidRequest
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from baton.node.describe import from_info, to_addresses, to_info, to_measure, to_warm_ups
from baton.node.peer_checks import check_info
from baton.protos.internal.v1 import decode_pb2
from baton.protos.v1 import common_pb2, node_status_pb2
from baton.rpc import convert, convert_node
from baton.rpc.error_detail import from_detail, to_detail
from kvtransfer.plan import WIRE_NEWEST, WIRE_OLDEST, NodeDescription, PlanRefused, agree, links_between
from kvtransfer.segments import Segment, Tag, decode_trailer
from tests.fuzz import mutate
from tests.fuzz.target import Case, Target, Targets

Kind = TypeVar("Kind", bound=Message)

_OURS = NodeDescription(
    architecture="LlamaForCausalLM",
    config_digest="c",
    weights_digest="w",
    spec=KVCacheSpec(
        KVKind.GQA,
        num_layers=4,
        num_kv_heads=2,
        head_dim=64,
        dtype="float32",
        index=KVCacheSpec(KVKind.MLA, num_layers=4, num_kv_heads=1, head_dim=8, dtype="float32"),
        state=KVCacheSpec(KVKind.STATE, num_layers=2, num_kv_heads=4, head_dim=32, dtype="float32"),
        draft=KVCacheSpec(KVKind.GQA, num_layers=1, num_kv_heads=2, head_dim=64, dtype="float32"),
    ),
    shape=KVCacheShape(KVCacheLayout["NHD"], 16, 64, state_slots=4),
    wire_oldest=WIRE_OLDEST,
    wire_newest=WIRE_NEWEST,
    package_version="1",
    batch_invariant=False,
    tensor_parallel_size=1,
    converted_kv_dtypes=("bfloat16",),
)
_INFO = to_info(
    _OURS,
    name="prefill-0",
    address="127.0.0.1:1",
    role=node_status_pb2.ROLE_PREFILL,
    incarnation=7,
    model_name="llama",
    max_context_tokens=1024,
)
_SEGMENT = Segment(7, 3, 0, 0, 4, 0, 64, 0, 2, 4096, 99)


def make_converted(random: Random) -> Case:
    number = random.randrange(len(_CONVERSIONS))
    return bytes([number]), _message(random, _CONVERSIONS[number][1])


def converted(case: Case) -> None:
    """A conversion of a message to plain values."""
    convert_, kind = _CONVERSIONS[case[0][0] % len(_CONVERSIONS)] if case[0] else _CONVERSIONS[0]
    convert_(parsed(kind, case[1]))


def make_error_details(random: Random) -> Case:
    return (_message(random, common_pb2.ErrorDetail),)


def error_details(case: Case) -> None:
    to_detail(from_detail(parsed(common_pb2.ErrorDetail, case[0])))


def make_hello(random: Random) -> Case:
    if random.random() < 0.7:
        return (mutate.changed_message(random, _INFO).SerializeToString(),)
    return (_message(random, node_status_pb2.NodeInfo),)


def hello(case: Case) -> str | None:
    """What a node concludes from a peer's description."""
    info = parsed(node_status_pb2.NodeInfo, case[0])
    check_info(info, role=_INFO.role)
    theirs = from_info(info)
    try:
        agree(_OURS, theirs)
    except PlanRefused as error:
        return f"no plan: {error}"[:60]
    links_between(theirs, _OURS)
    return None


def make_trailer(random: Random) -> Case:
    return mutate.data(random, _SEGMENT.encode(_SEGMENT.digest)), random.randbytes(8)


def trailer(case: Case) -> str | None:
    """The end of a KV message, and the tag that announces it."""
    segment = decode_trailer(case[0])
    if segment is not None and segment.layer_step:  # leases refuse 0
        assert segment.encode(segment.digest)
        assert segment.cells is not None
        assert segment.summand >= 0
    tag = Tag.unpack(int.from_bytes(case[1][:8], "little"))
    assert Tag.unpack(tag.pack()) == tag
    return "no trailer" if segment is None else None


_CONVERSIONS: tuple[tuple[Callable[[Any], object], type[Message]], ...] = (
    (convert.sampling_from_proto, common_pb2.SamplingParams),
    (convert.slo_from_proto, common_pb2.Slo),
    (convert_node.costs_from_proto, node_status_pb2.StepCosts),
    (convert.usage_from_proto, common_pb2.Usage),
    (convert.token_from_proto, common_pb2.Token),
    (convert.receipt_from_proto, common_pb2.Receipt),
    (to_warm_ups, decode_pb2.WarmedUp),
    (to_measure, decode_pb2.PairReady),
    (lambda address: to_addresses([address]), decode_pb2.WorkerAddress),
)


def parsed(kind: type[Kind], data: bytes) -> Kind:
    """Parses bytes as a server does: it raises InvalidRequest if they are not a message of this kind."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InvalidRequest("no such message") from None


def _message(random: Random, kind: type[Message]) -> bytes:
    made = mutate.message(random, kind).SerializeToString()
    return mutate.data(random, made) if random.random() < 0.2 else made


def message_targets() -> AbstractContextManager[Targets]:
    return nullcontext(
        {
            "converted": Target(make_converted, converted),
            "error_details": Target(make_error_details, error_details),
            "hello": Target(make_hello, hello),
            "trailer": Target(make_trailer, trailer),
        }
    )
