"""Targets: messages of peers, as far as pure code reads them, and the headers and trailers of KV messages."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from random import Random
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from baton import convert
from baton.error_detail import from_detail, to_detail
from baton.errors import PeerRefused
from kvcache.layout import KVCacheLayout
from kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from kvtransfer.plan import WIRE_NEWEST, WIRE_OLDEST, NodeDescription, PlanRefused, agree, links_between
from kvtransfer.segments import Segment, Tag, decode_trailer
from node.describe import from_info, to_addresses, to_info, to_measure, to_warm_ups
from node.hello import check_info
from protos.baton.v1 import common_pb2, decode_pb2
from tests.fuzz import mutate
from tests.fuzz.target import Parse

Kind = TypeVar("Kind", bound=Message)

_OURS = NodeDescription(
    architecture="LlamaForCausalLM",
    config_digest="c",
    weights_digest="w",
    spec=KVCacheSpec(KVKind.GQA, num_layers=4, num_kv_heads=2, head_dim=64, dtype="float32"),
    shape=KVCacheShape(KVCacheLayout["NHD"], 16, 64),
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
    role=common_pb2.ROLE_PREFILL,
    incarnation=7,
    model_name="llama",
    max_context_tokens=1024,
)
_SEGMENT = Segment(7, 3, 0, 0, 4, 0, 64, 0, 2, 4096, 99)


def converted(random: Random) -> None:
    """A conversion of a message to plain values."""
    convert_, kind = random.choice(_CONVERSIONS)
    convert_(_message(random, kind))


def error_details(random: Random) -> None:
    to_detail(from_detail(_message(random, common_pb2.ErrorDetail)))


def hello(random: Random) -> None:
    """What a node concludes from a peer's description."""
    info = mutate.changed_message(random, _INFO) if random.random() < 0.7 else _message(random, common_pb2.NodeInfo)
    try:
        check_info(info, role=_INFO.role)
    except PeerRefused:
        return
    theirs = from_info(info)
    try:
        agree(_OURS, theirs)
    except PlanRefused:
        return
    links_between(theirs, _OURS)


def trailer(random: Random) -> None:
    """The end of a KV message, and the tag that announces it."""
    segment = decode_trailer(mutate.data(random, _SEGMENT.encode(_SEGMENT.digest)))
    if segment is not None and segment.layer_step:  # leases refuse 0
        assert segment.encode(segment.digest)
        assert segment.cells is not None
        assert segment.summand >= 0
    tag = Tag.unpack(random.getrandbits(64))
    assert Tag.unpack(tag.pack()) == tag


_CONVERSIONS: tuple[tuple[Callable[[Any], object], type[Message]], ...] = (
    (convert.sampling_from_proto, common_pb2.SamplingParams),
    (convert.slo_from_proto, common_pb2.Slo),
    (convert.costs_from_proto, common_pb2.StepCosts),
    (convert.usage_from_proto, common_pb2.Usage),
    (convert.token_from_proto, common_pb2.Token),
    (convert.receipt_from_proto, common_pb2.Receipt),
    (to_warm_ups, decode_pb2.WarmedUp),
    (to_measure, decode_pb2.PairReady),
    (lambda address: to_addresses([address]), decode_pb2.WorkerAddress),
)


def _message(random: Random, kind: type[Kind]) -> Kind:
    made = mutate.message(random, kind)
    assert isinstance(made, kind)
    if random.random() < 0.3:
        with suppress(DecodeError):
            made = kind.FromString(mutate.data(random, made.SerializeToString()))
    return made


MESSAGE_TARGETS: Mapping[str, Parse] = {parse.__name__: parse for parse in (converted, error_details, hello, trailer)}
