"""A node's cache in messages and back."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.core.errors import PeerRefused
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from baton.node.describe import from_info, to_info
from baton.protos.v1 import node_status_pb2 as pb
from kvtransfer.plan import WIRE_NEWEST, NodeDescription, wire_oldest

KV = KVCacheSpec(KVKind.GQA, num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16", windows=(0, 4))
INDEX = KVCacheSpec(KVKind.MLA, num_layers=2, num_kv_heads=1, head_dim=6, dtype="bfloat16")
STATE = KVCacheSpec(KVKind.STATE, num_layers=3, num_kv_heads=8, head_dim=10, dtype="float32")
DRAFT = replace(KV, num_layers=1, windows=())
WHOLE = replace(KV, index=INDEX, draft=DRAFT, state=STATE)
SPECS = [KV, replace(KV, index=INDEX), replace(KV, state=STATE), replace(KV, draft=DRAFT), WHOLE]
SPECS.append(replace(WHOLE, draft=replace(DRAFT, index=INDEX)))


def description(spec: KVCacheSpec) -> NodeDescription:
    slots = 9 if spec.state else 0
    shape = KVCacheShape(KVCacheLayout.HND, 16, 64, slots)
    digest = "d" if spec.draft else ""
    return NodeDescription("A", "c", "w", spec, shape, wire_oldest(spec), WIRE_NEWEST, "1.0", draft_digest=digest)


def info_of(spec: KVCacheSpec) -> pb.NodeInfo:
    return to_info(
        description(spec),
        name="prefill-0",
        address="127.0.0.1:1",
        role=pb.ROLE_PREFILL,
        incarnation=7,
        model_name="a",
        max_context_tokens=64,
    )


@pytest.mark.parametrize("spec", SPECS)
def test_every_part_of_a_cache_is_described(spec: KVCacheSpec) -> None:
    info = pb.NodeInfo.FromString(info_of(spec).SerializeToString())
    assert from_info(info) == description(spec)


def test_parts_of_parts_are_not_looked_at_except_the_index_of_a_draft() -> None:
    info = info_of(WHOLE)
    for part in (info.cache_spec.index, info.cache_spec.draft, info.cache_spec.state):
        part.draft.kind = 17  # type: ignore[assignment]
    assert from_info(info) == description(WHOLE)


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: setattr(spec, "kind", pb.KV_KIND_STATE),
        lambda spec: setattr(spec.index, "kind", pb.KV_KIND_GQA),
        lambda spec: setattr(spec.state, "kind", pb.KV_KIND_UNSPECIFIED),
        lambda spec: setattr(spec.state, "kind", 17),
        lambda spec: setattr(spec.draft, "kind", pb.KV_KIND_STATE),
        lambda spec: setattr(spec.draft.index, "kind", pb.KV_KIND_GQA),
    ],
)
def test_a_part_of_a_kind_that_it_cannot_have_is_refused(change: Callable[[pb.CacheSpec], None]) -> None:
    info = info_of(WHOLE)
    change(info.cache_spec)
    with pytest.raises(PeerRefused, match="this version does not know"):
        from_info(info)
