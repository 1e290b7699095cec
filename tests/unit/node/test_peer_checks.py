"""A peer's description of itself is checked before anything is derived from it."""

from collections.abc import Callable
from typing import Any

import pytest

from baton.core.errors import PeerRefused
from baton.node.peer_checks import check_accepted, check_addresses, check_info, check_measure
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.v1 import node_status_pb2
from kvtransfer.records import LinkMeasure

Change = Callable[[node_status_pb2.NodeInfo], None]


def an_info() -> node_status_pb2.NodeInfo:
    return node_status_pb2.NodeInfo(
        name="prefill-0",
        address="10.0.0.1:7001",
        role=node_status_pb2.ROLE_PREFILL,
        incarnation=7,
        model=node_status_pb2.ModelIdentity(architecture="LlamaForCausalLM", config_digest="a", weights_digest="b"),
        cache_spec=node_status_pb2.CacheSpec(
            num_layers=2, num_kv_heads=2, head_dim=64, dtype="float32", windows=[0, 16]
        ),
        cache_shape=node_status_pb2.CacheShape(layout="NHD", block_size=16, num_blocks=64),
    )


def a_part(**fields: Any) -> node_status_pb2.CacheSpec:
    right: dict[str, Any] = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 16, "dtype": "float32"}
    return node_status_pb2.CacheSpec(**{**right, **fields})


def set_to(path: str, value: object) -> Change:
    def change(info: node_status_pb2.NodeInfo) -> None:
        *parts, name = path.split(".")
        message = info
        for part in parts:
            message = getattr(message, part)
        setattr(message, name, value)

    return change


def test_a_nodes_description_is_taken() -> None:
    check_info(an_info(), role=node_status_pb2.ROLE_PREFILL)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("tensor_parallel_size", set_to("tensor_parallel_size", 1 << 20)),
        ("role", set_to("role", node_status_pb2.ROLE_DECODE)),
        ("incarnation", set_to("incarnation", 0)),
        ("name", set_to("name", "prefill-0\n12:00:00 decode_node INFO paired")),
        ("address", set_to("address", "a" * 600)),
        ("cache_spec.num_layers", set_to("cache_spec.num_layers", 0)),
        ("cache_spec.num_kv_heads", set_to("cache_spec.num_kv_heads", 1 << 31)),
        ("cache_spec.head_dim", set_to("cache_spec.head_dim", 1 << 31)),
        ("cache_shape.block_size", set_to("cache_shape.block_size", 0)),
        ("cache_shape.num_blocks", set_to("cache_shape.num_blocks", 1 << 60)),
        ("cache_spec.windows", lambda info: info.cache_spec.windows.append(4)),
        ("cache_spec.index.num_layers", set_to("cache_spec.index.head_dim", 4)),
        ("cache_spec.state.head_dim", lambda info: info.cache_spec.state.CopyFrom(a_part(head_dim=1 << 25))),
        ("cache_spec.state.dtype", lambda info: info.cache_spec.state.CopyFrom(a_part(dtype="float\n32"))),
        ("cache_spec.index", lambda info: info.cache_spec.index.CopyFrom(a_part(windows=[1, 1]))),
        ("cache_spec.index", lambda info: info.cache_spec.index.CopyFrom(a_part(state=a_part()))),
        ("converted_kv_dtypes", lambda info: info.converted_kv_dtypes.extend(["x"] * 17)),
        ("info", lambda info: info.cache_spec.windows.extend([1] * (1 << 17))),
    ],
)
def test_an_impossible_one_is_refused_with_the_field(field: str, change: Change) -> None:
    info = an_info()
    change(info)
    with pytest.raises(PeerRefused) as error:
        check_info(info, role=node_status_pb2.ROLE_PREFILL)
    assert (error.value.field, bool(error.value.allowed)) == (field, True)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "addresses",
    [
        [],
        [pb.WorkerAddress(), pb.WorkerAddress()],
        [pb.WorkerAddress(), pb.WorkerAddress(sender_rank=1), pb.WorkerAddress(sender_rank=2)],
        [pb.WorkerAddress(), pb.WorkerAddress(sender_rank=1, address=bytes(1 << 17))],
    ],
)
def test_too_few_too_many_and_too_long_addresses_are_refused(addresses: list[pb.WorkerAddress]) -> None:
    with pytest.raises(PeerRefused):
        check_addresses(addresses, links=2)


def test_a_sender_number_that_no_tag_can_carry_is_refused() -> None:
    check_accepted(pb.PairAccepted(sender_number=4094), ranks=2)
    with pytest.raises(PeerRefused):
        check_accepted(pb.PairAccepted(sender_number=4095), ranks=2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_measure_that_is_no_number_is_refused(value: float) -> None:
    check_measure(LinkMeasure("cma", 1.0))
    with pytest.raises(PeerRefused):
        check_measure(LinkMeasure("cma", value))
