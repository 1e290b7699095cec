"""Names of entries survive their message, and impossible messages are refused before anything is made of them."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import BatonError, InvalidRequest, PeerRefused, UnknownLease
from baton.node.pull_messages import (
    check_hello,
    check_worker_addresses,
    entry_keys,
    pull_job,
    searched_entries,
    wanted_entries,
    wanted_job,
)
from baton.protos.internal.v1 import lease_pb2
from baton.protos.internal.v1 import node_pb2 as pb
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert_node import kept_prefix_from_proto
from kvtransfer.records import PullJob
from tests.unit.kvtransfer.offloading import keys_of

KEYS = keys_of(6, salt="a tenant")


def info(name: str, *, batch_invariant: bool = False) -> node_status_pb2.NodeInfo:
    described = node_status_pb2.NodeInfo(
        name=name,
        role=node_status_pb2.ROLE_DECODE,
        incarnation=7,
        tensor_parallel_size=1,
        batch_invariant=batch_invariant,
    )
    described.cache_spec.num_layers = described.cache_spec.num_kv_heads = described.cache_spec.head_dim = 1
    described.cache_shape.block_size = described.cache_shape.num_blocks = 1
    return described


@pytest.mark.parametrize("start", [0, 2])
def test_keys_survive_their_message(start: int) -> None:
    assert entry_keys(wanted_entries(5, KEYS[start:])) == KEYS[start:]


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens": b"1234"},
        {"digests": b"123", "tokens": b""},
        {"digests": b"", "tokens": b""},
        {"root": b"short"},
        {"parent": b""},
        {"number": 1 << 40},
    ],
)
def test_a_message_with_impossible_sizes_is_refused(changed: dict[str, object]) -> None:
    wanted = wanted_entries(5, KEYS)
    for field, value in changed.items():
        setattr(wanted, field, value)
    with pytest.raises(InvalidRequest):
        entry_keys(wanted)


@pytest.mark.parametrize("job", [PullJob(5, KEYS), PullJob(5, KEYS, KEYS[-1]), PullJob(5, (), KEYS[3])])
def test_entries_a_state_or_both_survive_their_message(job: PullJob) -> None:
    assert pull_job(wanted_job(job)) == job


def test_a_message_that_leaves_nothing_to_send_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="the caller has 6 of the entries"):
        pull_job(wanted_entries(5, KEYS, held=6))
    with pytest.raises(InvalidRequest, match="the caller has 7 of the entries"):
        pull_job(wanted_entries(5, KEYS, held=7, with_state=True))
    with pytest.raises(InvalidRequest, match="the caller has 7 of the entries"):
        searched_entries(pb.EntrySearch(entries=wanted_entries(5, KEYS, held=7), every=1))
    assert searched_entries(pb.EntrySearch(entries=wanted_entries(5, KEYS, held=6), every=2)) == (KEYS, 6)


@given(st.binary(max_size=300))
def test_any_message_gives_keys_or_a_typed_error(content: bytes) -> None:
    wanted = pb.WantedEntries(root=content[:16], parent=content[16:32], digests=content[32:64], tokens=content[64:])
    with suppress(InvalidRequest):
        assert entry_keys(wanted)


def test_a_hint_without_an_address_is_none() -> None:
    assert kept_prefix_from_proto(lease_pb2.KeptPrefix()) is None
    kept = kept_prefix_from_proto(lease_pb2.KeptPrefix(address="a:1", incarnation=3, tokens=640))
    assert kept is not None
    assert (kept.address, kept.incarnation, kept.tokens) == ("a:1", 3, 640)


def hello() -> pb.PullHello:
    return pb.PullHello(info=info("reader"), incarnation=7, namespace=b"n", worker_addresses=[b"a"])


def test_a_reader_of_the_same_kind_is_taken() -> None:
    check_hello(hello(), info("owner"), b"n")


@pytest.mark.parametrize(
    ("namespace", "ours", "error", "message"),
    [
        (b"m", info("owner", batch_invariant=True), PeerRefused, "batch_invariant is True and False"),
        (b"m", info("owner"), PeerRefused, "their devices or dtypes differ"),
        (b"n", node_status_pb2.NodeInfo(name="owner", incarnation=9), UnknownLease, "incarnation 7 of owner is over"),
    ],
)
def test_a_reader_of_another_kind_is_refused(
    namespace: bytes, ours: node_status_pb2.NodeInfo, error: type[BatonError], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_hello(hello(), ours, namespace)


def test_a_caller_that_is_no_node_is_refused() -> None:
    caller = hello()
    caller.info.role = node_status_pb2.ROLE_UNSPECIFIED
    with pytest.raises(PeerRefused):
        check_hello(caller, info("owner"), b"n")


@pytest.mark.parametrize("addresses", [[], [b"a"], [b"a", b"b", b"c"], [b"a", b"b" * 70_000]])
def test_each_link_has_one_address_of_a_possible_length(addresses: list[bytes]) -> None:
    with pytest.raises(PeerRefused):
        check_worker_addresses(addresses, links=2)
