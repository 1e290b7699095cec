"""Which nodes can exchange KV, and what they are told when they cannot."""

from dataclasses import replace

import pytest

from attention.layout import KVCacheLayout
from attention.spec import FP8_DTYPES, KVCacheShape, KVCacheSpec, KVKind
from baton.errors import PeerRefused
from kvtransfer.plan import WIRE_NEWEST, WIRE_OLDEST, NodeDescription, PlanRefused, agree

SPEC = KVCacheSpec(KVKind.GQA, num_layers=4, num_kv_heads=2, head_dim=8, dtype="bfloat16")
NODE = NodeDescription(
    architecture="LlamaForCausalLM",
    config_digest="c0ffee",
    weights_digest="beef",
    spec=SPEC,
    shape=KVCacheShape(KVCacheLayout.NHD, 16, 64),
    wire_oldest=WIRE_OLDEST,
    wire_newest=WIRE_NEWEST,
    package_version="1.0.0",
)


def test_equal_nodes_agree_on_the_newest_wire() -> None:
    plan = agree(NODE, NODE)
    assert plan.wire_version == WIRE_NEWEST
    assert plan.bytes_per_token_layer == 2 * 2 * 8 * 2
    assert plan.bytes_per_token == 4 * plan.bytes_per_token_layer


def test_layout_block_size_number_of_blocks_and_package_version_may_differ() -> None:
    other = replace(NODE, shape=KVCacheShape(KVCacheLayout.BLHNC, 64, 7), package_version="2.1.0")
    assert agree(NODE, other) == agree(NODE, NODE)


@pytest.mark.parametrize("field", ["architecture", "config_digest", "weights_digest"])
def test_another_model_is_refused(field: str) -> None:
    with pytest.raises(PlanRefused) as refused:
        agree(NODE, replace(NODE, **{field: "other"}))  # type: ignore[arg-type]
    (mismatch,) = refused.value.mismatches
    assert (mismatch.field, mismatch.theirs) == (field, "other")
    assert "checkpoint" in mismatch.cure


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_layers", 5), ("num_kv_heads", 1), ("head_dim", 16), ("kind", KVKind.MLA), ("dtype", "float16")],
)
def test_another_kind_of_kv_is_refused(field: str, value: object) -> None:
    with pytest.raises(PlanRefused) as refused:
        agree(NODE, replace(NODE, spec=replace(SPEC, **{field: value})))  # type: ignore[arg-type]
    (mismatch,) = refused.value.mismatches
    assert (mismatch.field, mismatch.ours, mismatch.theirs) == (field, str(getattr(SPEC, field)), str(value))


def test_two_8_bit_caches_are_as_different_as_any_two_dtypes() -> None:
    ours, theirs = (replace(NODE, spec=replace(SPEC, dtype=dtype)) for dtype in FP8_DTYPES)
    with pytest.raises(PlanRefused) as refused:
        agree(ours, theirs)
    (mismatch,) = refused.value.mismatches
    assert (mismatch.field, mismatch.ours, mismatch.theirs) == ("dtype", *FP8_DTYPES)
    assert "--kv-cache-dtype" in mismatch.cure
    assert agree(ours, ours).bytes_per_token * 2 == agree(NODE, NODE).bytes_per_token


def test_one_node_that_is_batch_invariant_and_one_that_is_not_are_refused() -> None:
    invariant = replace(NODE, batch_invariant=True)
    with pytest.raises(PlanRefused) as refused:
        agree(invariant, NODE)
    (mismatch,) = refused.value.mismatches
    assert (mismatch.field, mismatch.ours, mismatch.theirs) == ("batch_invariant", "on", "off")
    assert "BATON_BATCH_INVARIANT" in mismatch.cure
    assert agree(invariant, invariant) == agree(NODE, NODE)


def test_every_mismatch_is_listed() -> None:
    theirs = replace(NODE, weights_digest="other", spec=replace(SPEC, num_layers=2, dtype="float32"), wire_oldest=9)
    theirs = replace(theirs, wire_newest=9)
    with pytest.raises(PeerRefused) as refused:
        agree(NODE, theirs)
    assert isinstance(refused.value, PlanRefused)
    assert [item.field for item in refused.value.mismatches] == ["weights_digest", "num_layers", "dtype", "wire"]
    for item in refused.value.mismatches:
        assert item.field in str(refused.value)
        assert item.cure in str(refused.value)


def test_wire_ranges_that_overlap_agree_on_the_newest_common_version() -> None:
    assert (
        agree(replace(NODE, wire_oldest=1, wire_newest=3), replace(NODE, wire_oldest=2, wire_newest=7)).wire_version
        == 3
    )
    assert (
        agree(replace(NODE, wire_oldest=2, wire_newest=7), replace(NODE, wire_oldest=1, wire_newest=2)).wire_version
        == 2
    )


def test_the_cure_of_a_wire_mismatch_names_the_older_node() -> None:
    newer = replace(NODE, wire_oldest=WIRE_NEWEST + 1, wire_newest=WIRE_NEWEST + 2, package_version="9.0.0")
    with pytest.raises(PlanRefused) as ours_older:
        agree(NODE, newer)
    assert ours_older.value.mismatches[0].cure == "upgrade this node from package version 1.0.0"
    with pytest.raises(PlanRefused) as theirs_older:
        agree(newer, NODE)
    assert theirs_older.value.mismatches[0].cure == "upgrade the other node from package version 1.0.0"
